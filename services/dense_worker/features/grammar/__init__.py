"""Structured output: the grammars of forms, and the masks that let only fitting tokens through."""
