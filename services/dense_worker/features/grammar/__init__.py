"""Structured output: grammars, and the masks that let only fitting tokens through."""
