"""Adapters (LoRA): which of them have a slot, their loading, and the sequences that have one."""
