"""Several attention workers for one dense worker: each has some of the sequences, and they come and go meanwhile."""
