"""Adapters: their identity, and their checkpoints; vectors in prompts. No torch, so that gateways can check them."""
