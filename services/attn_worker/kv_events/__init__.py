"""Tells routers which blocks the prefix cache has, in vLLM's format; off unless `attention.kv_events` is set."""
