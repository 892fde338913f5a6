"""Answers and events of the Messages API."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlockObject(TypedDict):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlockObject(TypedDict):
    """Reasoning. This server signs nothing; clients demand a signature."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlockObject(TypedDict):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Any


ContentBlock = TextBlockObject | ThinkingBlockObject | ToolUseBlockObject


class UsageObject(TypedDict):
    """Token counts; the prompt has `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageObject(TypedDict):
    """The whole answer. `stop_sequence` is the one that ended it."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: UsageObject


class TokensCount(TypedDict):
    """Number of tokens of the prompt."""

    input_tokens: int


class ModelInfo(TypedDict):
    """The served model under one of its names."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int


class ModelPage(TypedDict):
    """The served model under all its names, on one page."""

    data: list[ModelInfo]
    has_more: Literal[False]
    first_id: str
    last_id: str
