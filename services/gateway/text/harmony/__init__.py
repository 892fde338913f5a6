"""Harmony, the format of gpt-oss: messages with channels for reasoning, calls and the answer.

The package openai-harmony is not used: it loads its own vocabulary over the network when it starts, and the tokens here
are those of the served model.
"""

from __future__ import annotations

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"  # of a message; the last two also end the answer
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL)
ANSWER_ENDS = (RETURN, CALL)
HARMONY = "harmony"  # in gateway.tool_parser and gateway.reasoning_parser
REASONING_EFFORTS = ("low", "medium", "high")


def is_harmony_template(text: str) -> bool:
    """Whether a chat template writes messages with channels."""
    return CHANNEL in text and MESSAGE in text and START in text
