"""Harmony, the format of gpt-oss: messages with channels for reasoning, calls and the answer."""
