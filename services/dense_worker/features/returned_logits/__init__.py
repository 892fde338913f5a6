"""Sequences that report logits of the model itself: after the tokens of their prompts, or of their output."""
