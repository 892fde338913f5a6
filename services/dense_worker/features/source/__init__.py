"""Sequences of a model with an encoder: what it reads for each, and how its output crosses the seam."""
