"""Reasoning: a parser that separates it from the answer, and the limit of its length."""
