"""How far the prompt of a stream is computed. It comes in chunks of its own, before the first token."""

from __future__ import annotations

import time
from dataclasses import dataclass

from services.gateway.features.report import Report, Reporter, ReportRecord
from services.step.sequence_spec import SequenceSpec


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the prompt of an answer is computed; counts are tokens."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int  # cached ones included
    time_s: float  # since its first step
    is_first: bool  # of the answer

    @property
    def num_values(self) -> int:
        return 4


class _Record(ReportRecord):
    def __init__(self) -> None:
        self._num_computed = 0
        self._is_new = False  # the client has not been told
        self._is_first = True

    @property
    def num_reported(self) -> int:
        return self._num_computed

    def keep(self, start: int, num_tokens: int, values: bytes) -> bool:
        self._num_computed = start + num_tokens
        self._is_new = True
        return True

    def take(self, reporter: Reporter, num_tokens: int, is_last: bool) -> Progress | None:
        if not self._is_new:
            return None
        is_first, self._is_new, self._is_first = self._is_first, False, False
        time_s = time.monotonic() - reporter.arrival - (reporter.queue_s or 0.0)
        num_cached = reporter.num_cached_tokens
        return Progress(reporter.spec.num_prompt_tokens, num_cached, self._num_computed, time_s, is_first)


class PromptProgress(Report):
    """Only streams over HTTP show it."""

    name = "progress"
    field = "return_progress"
    is_of_prompt = True
    is_in_grpc = False

    def record(self, spec: SequenceSpec, *, may_be_cut: bool) -> ReportRecord:
        return _Record()
