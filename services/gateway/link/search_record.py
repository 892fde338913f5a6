"""`SearchRecord`: what a beam search has found so far. With it another dense worker goes on where the last one died."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from services.pb import dense_pb2

_Message = TypeVar("_Message", dense_pb2.Beam, dense_pb2.BeamAnswer)


@dataclass(frozen=True, slots=True)
class _Token:
    """The last token of a beginning of an answer. Beginnings with the same first tokens share them."""

    parent: _Token | None  # the token before it
    token_id: int
    logprobs: bytes | None  # a `TokenLogprobs` message, which nobody here reads; None: not requested


@dataclass(frozen=True, slots=True)
class _Beginning:
    last: _Token
    score: float


class SearchRecord:
    """A step adds one token to each beam, however long they are; only a message of all of them takes their length."""

    def __init__(self, num_beams: int) -> None:
        self._num_beams = num_beams
        self._beams: list[_Beginning] = []  # the best one first
        self._ended: list[_Beginning] = []  # the best answers that have ended, the best one first

    def add(self, step: dense_pb2.BeamStep) -> None:
        """Adds what a step has found."""
        before: list[_Token | None] = [beam.last for beam in self._beams] or [None]
        logprobs = [each.SerializeToString() for each in step.logprobs] or [None] * len(step.parents)
        columns = zip(step.parents, step.token_ids, step.scores, logprobs, strict=True)
        self._beams = [
            _Beginning(_Token(before[parent], token_id, each), score) for parent, token_id, score, each in columns
        ]
        for each in step.ended:
            logprob = each.logprobs.SerializeToString() if each.HasField("logprobs") else None
            self._ended.append(_Beginning(_Token(before[each.parent], each.token_id, logprob), each.score))
        self._ended.sort(key=lambda each: each.score, reverse=True)
        del self._ended[self._num_beams :]

    def encode(self) -> tuple[list[dense_pb2.Beam], list[dense_pb2.BeamAnswer]]:
        """The beams, and the answers that have ended."""
        beams = [_fill(dense_pb2.Beam(score=each.score), each.last) for each in self._beams]
        answers = [
            _fill(dense_pb2.BeamAnswer(score=each.score, reason=dense_pb2.SequenceEnd.STOP), each.last)
            for each in self._ended
        ]
        return beams, answers


def _fill(message: _Message, last: _Token) -> _Message:
    """Adds the tokens up to the last one to a message."""
    tokens: list[_Token] = []
    token: _Token | None = last
    while token is not None:
        tokens.append(token)
        token = token.parent
    tokens.reverse()
    message.token_ids.extend([each.token_id for each in tokens])
    for each in tokens:
        if each.logprobs is not None:
            message.logprobs.add().MergeFromString(each.logprobs)
    return message
