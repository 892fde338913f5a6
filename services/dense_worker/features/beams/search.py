"""`BeamSearch`: which beginnings of answers are kept, and which answers are the best. Plain Python.

The choice is that of `transformers.generate(num_beams=...)`, `_beam_search` in its version 5: the same beams, scores
and end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.beams.options import BeamSearchOptions, EarlyStopping
from services.common.token_logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Beam:
    """The beginning of an answer."""

    token_ids: list[int]  # output tokens; never changed
    logprobs: list[TokenLogprobs]  # aligned with them
    score: float  # sum of their log-probabilities


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An answer that has ended."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]  # aligned with them
    score: float  # with the length penalty
    is_stopped: bool  # by a stop token, which is the last one; otherwise by max_tokens


@dataclass(frozen=True, slots=True)
class SearchState:
    """What a search has found so far. With it another one goes on and finds the same answers."""

    beams: list[Beam]  # the best one first; all have as many tokens, at least one
    ended: list[Hypothesis]  # the best one first


@dataclass(frozen=True, slots=True)
class SearchStep:
    """What one token more has changed. A beam's parent is the index of the beam before that it continues."""

    beams: list[Beam]  # the best one first; unchanged if the search is done
    parents: list[int]  # aligned with them
    ended: list[tuple[int, Hypothesis]]  # answers that have ended, with their parents


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A beam and a token that may follow."""

    beam: int  # index of the beam
    token_id: int
    logprob: float
    score: float  # of both


class BeamSearch:
    """Call `advance` with the most likely next tokens of each beam until `is_done`."""

    def __init__(
        self,
        options: BeamSearchOptions,
        max_tokens: int,
        stop_token_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        num_logprobs: int = 0,
        state: SearchState | None = None,
    ) -> None:
        """`min_tokens`: shorter answers do not end; `num_logprobs`: most likely tokens to keep of each position.

        `state`: of a search with the same options, which goes on here
        """
        self._options = options
        self._max_tokens = max_tokens
        self._stop_token_ids = stop_token_ids
        self._min_tokens = min_tokens
        self._num_logprobs = num_logprobs
        self.beams = [Beam([], [], 0.0)]  # the best one first; only one before the first token
        self._ended: list[Hypothesis] = []  # the best one first
        if state is not None:
            self.beams, self._ended = state.beams, list(state.ended)
        self.is_done = False

    @property
    def num_candidates(self) -> int:
        """Number of most likely tokens of each beam that `advance` needs.

        Even if all stop tokens are among them, as many others follow each beam as there are beams to choose.
        """
        return self._options.num_beams + len(self._stop_token_ids)

    @property
    def hypotheses(self) -> list[Hypothesis]:
        """The best answers, when the search is done."""
        return self._ended[: self._options.num_answers]

    def advance(self, rows: Sequence[TokenLogprobs]) -> SearchStep:
        """Adds a token to the beams, unless the search is done.

        rows: aligned with the beams; `top` has the `num_candidates` most likely tokens, the most likely one first
        """
        options = self._options
        num_tokens = len(self.beams[0].token_ids) + 1
        is_last = num_tokens == self._max_tokens
        next_beams: list[_Candidate] = []
        ended: list[tuple[int, Hypothesis]] = []
        for rank, candidate in enumerate(self._candidates(rows)):
            is_stopped = candidate.token_id in self._stop_token_ids
            if not (is_stopped or is_last):
                next_beams.append(candidate)
            elif rank < options.num_beams:
                tokens, logprobs = self._continue(candidate, rows)
                score = candidate.score / num_tokens**options.length_penalty
                ended.append((candidate.beam, Hypothesis(tokens, logprobs, score, is_stopped)))
        self._ended += [hypothesis for _, hypothesis in ended]
        self._ended.sort(key=lambda each: each.score, reverse=True)
        del self._ended[options.num_beams :], next_beams[options.num_beams :]
        self.is_done = is_last or not next_beams or not self._may_improve(next_beams[0].score, num_tokens)
        if not self.is_done:
            self.beams = [Beam(*self._continue(each, rows), each.score) for each in next_beams]
        return SearchStep(self.beams, [each.beam for each in next_beams], ended)

    def _candidates(self, rows: Sequence[TokenLogprobs]) -> list[_Candidate]:
        is_too_short = len(self.beams[0].token_ids) < self._min_tokens
        candidates = [
            _Candidate(index, token_id, logprob, beam.score + logprob)
            for index, (beam, row) in enumerate(zip(self.beams, rows, strict=True))
            for token_id, logprob in row.top[: self.num_candidates]
            if not (is_too_short and token_id in self._stop_token_ids)
        ]
        candidates.sort(key=lambda each: each.score, reverse=True)
        return candidates

    def _continue(
        self, candidate: _Candidate, rows: Sequence[TokenLogprobs]
    ) -> tuple[list[int], list[TokenLogprobs]]:
        beam = self.beams[candidate.beam]
        logprobs = TokenLogprobs(candidate.logprob, rows[candidate.beam].top[: self._num_logprobs])
        return [*beam.token_ids, candidate.token_id], [*beam.logprobs, logprobs]

    def _may_improve(self, best_score: float, num_tokens: int) -> bool:
        """Whether the search goes on; `best_score` is that of the best beam, of `num_tokens` tokens."""
        options = self._options
        if len(self._ended) < options.num_beams:
            return True
        if options.early_stopping is EarlyStopping.ALWAYS:
            return False
        length = num_tokens
        if options.early_stopping is EarlyStopping.NEVER and options.length_penalty > 0.0:
            length = self._max_tokens
        return best_score / length**options.length_penalty > self._ended[-1].score
