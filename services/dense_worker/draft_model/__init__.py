"""A draft model: a small model with the same vocabulary, whose guesses a step of the served model verifies."""
