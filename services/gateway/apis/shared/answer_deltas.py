"""Streamed and whole answers as the same sequence of deltas, so that one piece of code turns both into objects."""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway.core.chunks import Chunk, Completion
from services.gateway.text.answer_parts import ReasoningPart, TextPart
from services.gateway.text.deltas import CallArguments, CallBegin, CallEnd, ContentDelta, Delta, ReasoningDelta


def chunk_deltas(chunk: Chunk) -> Sequence[Delta]:
    """The deltas of a piece of an answer."""
    if chunk.deltas:
        return chunk.deltas
    return (ContentDelta(chunk.text),) if chunk.text else ()


def completion_deltas(completion: Completion) -> Sequence[Delta]:
    """The deltas of a whole answer, as few as possible."""
    if completion.parts is None:
        return (ContentDelta(completion.text),) if completion.text else ()
    assert completion.finish is not None
    deltas: list[Delta] = []
    num_calls = 0
    for part in completion.parts.parts:
        if isinstance(part, TextPart):
            deltas.append(ContentDelta(part.text))
        elif isinstance(part, ReasoningPart):
            deltas.append(ReasoningDelta(part.text))
        else:
            is_cut = num_calls >= completion.finish.num_calls  # which counts complete calls
            deltas += (
                CallBegin(num_calls, part.call_id, part.name),
                CallArguments(num_calls, part.arguments),
                CallEnd(num_calls, is_cut=is_cut),
            )
            num_calls += 1
    return deltas
