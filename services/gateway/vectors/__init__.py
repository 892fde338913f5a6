"""Vectors of inputs, and scores and classes that are made of them."""
