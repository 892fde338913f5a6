"""Logits, hidden states and log-probabilities of prompts, which clients ask for."""
