"""The adapters of the dense worker: which of them have a slot, their tensors, and the deltas of a step."""
