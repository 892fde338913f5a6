"""Sequences that report how likely given tokens were together at the place of each output token."""
