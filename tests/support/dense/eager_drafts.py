"""`EagerDrafts`: a source of drafts that gives every step drafts, whatever they cost. Subclasses guess."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.dense_worker.engine.observer import StepStats
from services.dense_worker.engine.sequence import Sequence as EngineSequence
from services.dense_worker.engine.sequence import SequenceOutput


class EagerDrafts:
    """A `DraftSource`; `propose` is left to subclasses."""

    def waits(self, running: Sequence[EngineSequence], max_num_drafts: int) -> bool:
        return True

    def wanted_guesses(self, running: Sequence[EngineSequence]) -> int:
        return False

    def take(self, sequence: EngineSequence, guesses: Sequence[int]) -> None: ...
    def begin_step(self, decodes: Sequence[EngineSequence], max_num_drafts: int) -> None: ...
    def finish(self, sequence: EngineSequence) -> None: ...
    def on_step(
        self, stats: StepStats, started: Iterable[EngineSequence], outputs: Iterable[SequenceOutput]
    ) -> None: ...
    def on_handoff_abort(self) -> None: ...
