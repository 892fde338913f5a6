"""`StepHook`: what takes something from every step on the device, and `FollowUp`: what is done after a single one.

Both enqueue work on the stream of the steps. They are parts of features; the model runner calls them.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from services.dense_worker.runner.batch_rows import RequestState
from services.step import PlanEntry


@dataclass(frozen=True, slots=True)
class KeptResiduals:
    """Where each step copies its residuals before some layers: the same memory for all steps and graphs."""

    layers: SequenceOf[int]  # may have a layer several times
    memory: torch.Tensor  # [max_num_tokens, len(layers), hidden]

    def put(self, layer: int, residual: torch.Tensor) -> None:
        """Copies the residual [n, hidden] before this layer, if it is one of the layers."""
        for place, each in enumerate(self.layers):
            if each == layer:
                self.memory[: len(residual), place] = residual


class StepHook:
    """May keep something of every step; this one does not. No method but `warm_up` waits for the device."""

    needs_logits: ClassVar[bool] = False  # also of steps whose tokens nobody reads

    def hidden_out(self, num_sampled: int) -> torch.Tensor | None:
        """Where a step writes its hidden states, [num_sampled, hidden]; None: they are not needed."""
        return None

    def residuals_out(self) -> KeptResiduals | None:
        """Where every step copies residuals; None: they are not needed."""
        return None

    def warm_up(self) -> None:
        """Runs it at its largest, so that this memory is there."""

    def keep(
        self, entries: Iterable[PlanEntry], sequences: SequenceOf[RequestState], sampled: torch.Tensor | None
    ) -> None:
        """Enqueues what has to be kept of a step.

        Called when a step has been sampled, before the next one overwrites its residuals. sequences: aligned with the
        entries; sampled: int64 [num_sampled], on the device, or None: the step samples no token
        """

    def forget(self, sequences: Iterable[RequestState]) -> None:
        """These sequences have been closed."""

    def forget_all(self) -> None:
        """All sequences have been closed."""


class FollowUp(Protocol):
    """Is asked for once, for the step under way; the next one may wait for it."""

    def enqueue(
        self, entries: Iterable[PlanEntry], sequences: SequenceOf[RequestState], sampled: torch.Tensor
    ) -> None:
        """Enqueues it. Called before another step is enqueued, and not for a step that samples no token.

        sequences: aligned with the entries; sampled: int64 [num_sampled], the step's tokens, on the device
        """

    def read(self) -> None:
        """Takes what the device has computed. Called when the step is collected, before its tokens are delivered."""
