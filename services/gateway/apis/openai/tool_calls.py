"""Calls of tools and reasoning in OpenAI's objects for chats, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterable

from services.gateway.apis.openai.answer_objects import FinishReasonName
from services.gateway.apis.openai.chat_schema import AnswerMessage, Delta
from services.gateway.apis.openai.tool_schema import AnswerToolCall, ToolCallDeltaObject
from services.gateway.core.chunks import Finish
from services.gateway.link.journal_entry import FinishReason
from services.gateway.text import deltas
from services.gateway.text.answer_parts import AnswerParts, ToolCall


def finish_reason(finish: Finish, is_named: bool) -> FinishReasonName:
    """`tool_calls` if the answer has calls. As with OpenAI, not if the request named the tool to call."""
    if finish.reason is FinishReason.STOP and finish.num_calls and not is_named:
        return "tool_calls"
    return finish.reason.value


def delta_object(pieces: Iterable[deltas.Delta], *, has_reasoning: bool) -> Delta:
    """The new part of an answer. `has_reasoning`: whether to show reasoning.

    `reasoning_content` is always there, because SGLang's clients read it from every delta.
    """
    content, reasoning = [], []
    calls: dict[int, ToolCallDeltaObject] = {}
    for piece in pieces:
        if isinstance(piece, deltas.ContentDelta):
            content.append(piece.text)
        elif isinstance(piece, deltas.ReasoningDelta):
            reasoning.append(piece.text)
        elif isinstance(piece, deltas.CallBegin):
            calls[piece.index] = {
                "index": piece.index,
                "id": piece.call_id,
                "type": "function",
                "function": {"name": piece.name, "arguments": ""},
            }
        elif isinstance(piece, deltas.CallArguments):
            call = calls.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += piece.text
    delta: Delta = {"reasoning_content": None}
    if reasoning and has_reasoning:
        delta["reasoning"] = delta["reasoning_content"] = "".join(reasoning)
    if content:
        delta["content"] = "".join(content)
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def add_parts(message: AnswerMessage, parts: AnswerParts, *, has_reasoning: bool) -> None:
    """Adds reasoning and calls to a whole message. Its content becomes null if it is empty."""
    message["content"] = message["content"] or None
    if has_reasoning:
        message["reasoning"] = message["reasoning_content"] = parts.reasoning() or None
    if calls := parts.calls:
        message["tool_calls"] = [_call_object(call) for call in calls]


def _call_object(call: ToolCall) -> AnswerToolCall:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
