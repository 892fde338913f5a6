"""`ContentBlocks`: from the deltas of an answer to content blocks and the events that build them up in a client."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic_core import from_json

from services.gateway.apis.anthropic.answer_objects import ContentBlock
from services.gateway.text.deltas import CallArguments, CallBegin, ContentDelta, Delta, ReasoningDelta

SIGNATURE = "unsigned"  # this server checks no signatures, but some clients drop a block without one


class ContentBlocks:
    """Call `add` for the deltas in order, then `end`. `blocks` has all blocks that have ended."""

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
