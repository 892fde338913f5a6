"""Outputs of which every so many tokens one is new to them."""
