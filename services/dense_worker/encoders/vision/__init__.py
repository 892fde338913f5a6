"""Towers: encoders of pictures."""
