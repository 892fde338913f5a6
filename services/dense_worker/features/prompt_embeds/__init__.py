"""Vectors in prompts: how the dense worker receives and keeps them, and the rows of steps that they stand in."""
