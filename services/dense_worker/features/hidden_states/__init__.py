"""Sequences that report the last hidden state of each token that they compute."""
