"""`ExpertLoads`: how many tokens each expert has got, for the metrics.

Steps count on the device, in kernels that run anyway. Every few steps the engine thread enqueues a copy to the host,
which nothing waits for; a scraper reads the last copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from services.dense_worker.engine.observer import StepStats
from services.dense_worker.engine.sequence import Sequence, SequenceOutput

_STEPS_BETWEEN_COPIES = 64


class ExpertLoads:
    """An `EngineObserver`."""

    def __init__(self, counts: Mapping[int, torch.Tensor]) -> None:
        """counts: int64 [num_experts] of each layer that counts, all on one device."""
        self._layers, self._counts = tuple(counts), tuple(counts.values())
        shape, device = (len(self._counts), len(self._counts[0])), self._counts[0].device
        self._copy = torch.zeros(shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._num_steps = 0

    def read(self) -> dict[int, list[int]]:
        """The tokens of each expert since the start, by layer, as of the last copy. Called on any thread."""
        return dict(zip(self._layers, self._copy.tolist(), strict=True))

    def on_step(self, stats: StepStats, started: Iterable[Sequence], outputs: Iterable[SequenceOutput]) -> None:
        """Enqueues a copy, after a few steps or if the worker has nothing left to run."""
        self._num_steps += 1
        if self._num_steps >= _STEPS_BETWEEN_COPIES or not stats.num_running:
            self._num_steps = 0
            self._copy.copy_(torch.stack(self._counts), non_blocking=True)

    def on_handoff_abort(self) -> None:
        """Counts stay: the tokens were computed."""
