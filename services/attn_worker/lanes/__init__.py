"""Several lanes: steps that run beside each other on one KV cache, each on its own channel."""
