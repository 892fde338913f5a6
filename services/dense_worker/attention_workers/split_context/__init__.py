"""Sequences that are larger than one attention worker's KV cache: each of several has a part of their context."""
