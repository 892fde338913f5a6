"""`SearchRecord`: what a beam search has found so far. With it another dense worker goes on where the last one died."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.token_logprobs import TokenLogprobs, decode_logprobs, encode_logprobs
from services.pb import dense_pb2, sampling_pb2


@dataclass(frozen=True, slots=True)
class _Token:
    """The last token of a beginning of an answer. Beginnings with the same first tokens share them."""

    parent: _Token | None  # the token before it
    token_id: int
    logprobs: TokenLogprobs | None  # None: not requested


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
        logprobs = list(map(decode_logprobs, step.logprobs)) or [None] * len(step.parents)
        columns = zip(step.parents, step.token_ids, step.scores, logprobs, strict=True)
        self._beams = [
            _Beginning(_Token(before[parent], token_id, each), score) for parent, token_id, score, each in columns
        ]
        for each in step.ended:
            logprob = decode_logprobs(each.logprobs) if each.HasField("logprobs") else None
            self._ended.append(_Beginning(_Token(before[each.parent], each.token_id, logprob), each.score))
        self._ended.sort(key=lambda each: each.score, reverse=True)
        del self._ended[self._num_beams :]

    def encode(self) -> tuple[list[dense_pb2.Beam], list[dense_pb2.BeamAnswer]]:
        """The beams, and the answers that have ended."""
        beams, answers = [], []
        for each in self._beams:
            token_ids, logprobs = _tokens_of(each)
            beams.append(dense_pb2.Beam(token_ids=token_ids, logprobs=logprobs, score=each.score))
        for each in self._ended:
            token_ids, logprobs = _tokens_of(each)
            answers.append(
                dense_pb2.BeamAnswer(
                    token_ids=token_ids, logprobs=logprobs, score=each.score, reason=dense_pb2.SequenceEnd.STOP
                )
            )
        return beams, answers


def _tokens_of(beginning: _Beginning) -> tuple[list[int], list[sampling_pb2.TokenLogprobs]]:
    token_ids: list[int] = []
    logprobs: list[sampling_pb2.TokenLogprobs] = []
    token: _Token | None = beginning.last
    while token is not None:
        token_ids.append(token.token_id)
        if token.logprobs is not None:
            logprobs.append(encode_logprobs(token.logprobs))
        token = token.parent
    token_ids.reverse()
    logprobs.reverse()
    return token_ids, logprobs
