"""LoRA adapters: their identity, and their checkpoints. No torch, so that gateways can check them."""
