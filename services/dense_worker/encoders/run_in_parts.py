"""`RunInParts`: the `EncoderRun` of what yields between parts of its work. Engine thread."""

from __future__ import annotations

import time
from collections.abc import Generator

import torch

from services.dense_worker.encoders.encoder import Encoded

MIN_PART_S = 0.02  # on a CPU: a run pauses after the part in which so much time is over


class RunInParts:
    """On a GPU all parts are enqueued at once, beside the steps. On a CPU, where steps wait, a few at a time run."""

    def __init__(self, parts: Generator[None, None, list[torch.Tensor]], stream: torch.cuda.Stream | None) -> None:
        """parts: returns the rows of each input; stream: None on a CPU"""
        self._parts = parts
        self._stream = stream

    @torch.inference_mode()
    def advance(self) -> list[Encoded] | None:
        """Computes or enqueues the next parts."""
        if self._stream is None:
            rows = self._run(time.monotonic() + MIN_PART_S)
            return None if rows is None else [Encoded(each.clone()) for each in rows]
        with torch.cuda.stream(self._stream):
            rows = self._run(None)
            assert rows is not None, "it has run to its end"
            # Each input gets memory of its own, because they are forgotten one by one.
            rows = [each.clone() for each in rows]
            done = self._stream.record_event()
        return [Encoded(each, done) for each in rows]

    def _run(self, end_s: float | None) -> list[torch.Tensor] | None:
        """Runs to the end, or to that of the part in which `end_s` is over. Returns the rows, if it has ended."""
        try:
            next(self._parts)
            while end_s is None or time.monotonic() < end_s:
                next(self._parts)
        except StopIteration as ended:
            return ended.value
        return None
