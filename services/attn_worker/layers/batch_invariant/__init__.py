"""Attention with `dense.deterministic`: the bits of a row depend on its sequence alone, and not on the step."""
