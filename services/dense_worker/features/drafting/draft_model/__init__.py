"""A draft model: a small model with the same vocabulary, whose tokens a step of the served model verifies."""
