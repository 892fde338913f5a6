"""Harmony, the format of gpt-oss: messages with channels for reasoning, calls and the answer.

The package openai-harmony is not used: it loads its own vocabulary over the network when it starts, and the tokens here
are those of the served model.
"""
