"""Sequences that report how far their prompts are computed."""
