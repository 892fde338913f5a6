"""Parts of sequences whose keys and values are split along the context over several attention workers."""
