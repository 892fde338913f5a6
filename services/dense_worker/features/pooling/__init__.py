"""Sequences of which one vector is made, or the values of a classifier."""
