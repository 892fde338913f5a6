"""Which adapters of the dense worker have a slot, and their loading."""
