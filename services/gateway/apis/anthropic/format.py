"""Answers of the Messages API: the whole message, or its events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from services.gateway.apis.anthropic.answer_objects import ContentBlock, MessageObject, StopReason, UsageObject
from services.gateway.apis.anthropic.errors import anthropic_error
from services.gateway.apis.anthropic.schema import CountTokensRequest, MessagesRequest
from services.gateway.apis.shared.answer import Format
from services.gateway.core.chunks import Chunk, Completion, Finish, Prompt
from services.gateway.core.request_service import RequestService
from services.gateway.http.headers import REQUEST_ID_HEADER
from services.gateway.link.journal_entry import FinishReason
from services.gateway.text.deltas import CallArguments, CallBegin, ContentDelta, Delta, ReasoningDelta

PARAM_NAMES = {
    "chat": "messages",
    "max_reasoning_tokens": "thinking.budget_tokens",
    "prompt": "messages",
    "request_id": REQUEST_ID_HEADER,
    "stop": "stop_sequences",
    "user": "metadata.user_id",
}
SIGNATURE = "unsigned"  # this server checks no signatures, but some clients drop a block without one


def param_names(body: CountTokensRequest) -> Mapping[str, str]:
    """The names of this API for fields of `GenerateRequest`."""
    names = dict(PARAM_NAMES)
    for i in range(len(body.tools or ())):
        names[f"tools[{i}].function"] = f"tools[{i}]"
        names[f"tools[{i}].function.parameters"] = f"tools[{i}].input_schema"
    return names


class MessagesFormat(Format):
    """The `Format` of messages. A message is the only answer to a single prompt."""

    has_event_names = True

    def __init__(self, service: RequestService, body: MessagesRequest, request_id: str) -> None:
        self.param_names = param_names(body)
        self._request_id = request_id
        self._model = body.model or service.names.first
        self._blocks = ContentBlocks()
        self._num_prompt_tokens = 0
        self._finish: Finish | None = None

    async def begin(self, prompts: Sequence[list[int]]) -> None:
        [prompt] = prompts
        self._num_prompt_tokens = len(prompt)

    def opening(self) -> Sequence[Any]:
        """The message without content. How many tokens are cached is known only later, and told at the end."""
        return [{"type": "message_start", "message": self._message()}, {"type": "ping"}]

    def chunk(self, prompt_index: int, chunk: Chunk) -> Sequence[Any]:
        self._finish = chunk.finish
        return self._blocks.add(chunk.all_deltas())

    def closing(self) -> Sequence[Any]:
        """The events after the last delta. The message has reason and counts now."""
        events = self._blocks.end()
        message = self._message()
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        return [*events, {"type": "message_delta", "delta": delta, "usage": message["usage"]}, {"type": "message_stop"}]

    def whole(self, answers: Sequence[tuple[Sequence[Completion], Prompt | None]]) -> MessageObject:
        [([completion], _)] = answers
        self._finish = completion.finish
        self._blocks.add(completion.all_deltas())
        self._blocks.end()
        return self._message()

    def failure(self, error: Exception) -> Sequence[Any]:
        return [anthropic_error(error, self._request_id)]

    def _message(self) -> MessageObject:
        finish = self._finish
        return {
            "id": f"msg_{self._request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._blocks.blocks if finish is not None else [],
            "stop_reason": None if finish is None else _stop_reason(finish),
            "stop_sequence": None if finish is None else finish.stop_string,
            "usage": _usage(self._num_prompt_tokens, finish),
        }


class ContentBlocks:
    """From the deltas of an answer to content blocks and the events that build them up in a client.

    Call `add` for the deltas in order, then `end`. `blocks` has all blocks that have ended.
    """

    def __init__(self) -> None:
        self.blocks: list[ContentBlock] = []
        self._open: dict[str, Any] | None = None  # the block that grows, empty as in its first event
        self._pieces: list[str] = []  # of its text or JSON

    def add(self, deltas: Iterable[Delta]) -> list[dict[str, Any]]:
        """The events for these deltas."""
        events: list[dict[str, Any]] = []
        for delta in deltas:
            if isinstance(delta, CallBegin):
                events += self._begin({"type": "tool_use", "id": delta.call_id, "name": delta.name, "input": {}})
            elif isinstance(delta, CallArguments):
                if delta.text:
                    events.append(self._grow({"type": "input_json_delta", "partial_json": delta.text}, delta.text))
            elif isinstance(delta, ContentDelta):
                if self._open is None or self._open["type"] != "text":
                    events += self._begin({"type": "text", "text": ""})
                events.append(self._grow({"type": "text_delta", "text": delta.text}, delta.text))
            elif isinstance(delta, ReasoningDelta):
                if self._open is None or self._open["type"] != "thinking":
                    events += self._begin({"type": "thinking", "thinking": "", "signature": ""})
                events.append(self._grow({"type": "thinking_delta", "thinking": delta.text}, delta.text))
        return events

    def end(self) -> list[dict[str, Any]]:
        """The events that end the last block."""
        if self._open is None:
            return []
        events = []
        block, joined = self._open, "".join(self._pieces)
        self._open, self._pieces = None, []
        if block["type"] == "tool_use":
            # The answer may have been cut off within the arguments.
            block["input"] = from_json(joined, allow_partial="trailing-strings") if joined else {}
        elif block["type"] == "thinking":
            events.append(self._delta({"type": "signature_delta", "signature": SIGNATURE}))
            block.update(thinking=joined, signature=SIGNATURE)
        else:
            block["text"] = joined
        events.append({"type": "content_block_stop", "index": len(self.blocks)})
        self.blocks.append(block)  # type: ignore[arg-type]
        return events

    def _begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        events = self.end()
        self._open = block
        events.append({"type": "content_block_start", "index": len(self.blocks), "content_block": dict(block)})
        return events

    def _grow(self, delta: dict[str, Any], piece: str) -> dict[str, Any]:
        self._pieces.append(piece)
        return self._delta(delta)

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.blocks), "delta": delta}


def _stop_reason(finish: Finish) -> StopReason:
    if finish.reason is FinishReason.LENGTH:
        return "max_tokens"
    if finish.stop_string is not None:
        return "stop_sequence"
    return "tool_use" if finish.num_calls else "end_turn"


def _usage(num_prompt_tokens: int, finish: Finish | None) -> UsageObject:
    num_cached_tokens = 0 if finish is None else finish.num_cached_tokens
    return {
        "input_tokens": num_prompt_tokens - num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached_tokens,
        "output_tokens": 0 if finish is None else finish.num_output_tokens,
    }
