"""Sequences that report the log-probabilities of the tokens of their prompts."""
