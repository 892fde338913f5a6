"""`EagerDrafting`: gives every step drafts, whatever they cost. Subclasses say which."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from services.dense_worker.engine.plan_builder import PlanBuilder
from services.dense_worker.engine.sequence import Sequence as EngineSequence
from services.dense_worker.engine.session import Session
from services.dense_worker.features.drafting.drafting import Drafting
from services.dense_worker.features.drafting.measured_drafting import room_for_drafts
from services.dense_worker.runner.model_runner import RunningStep


class EagerDrafting(Drafting, ABC):
    """Every step waits for the one before, and every sequence gets as many drafts as there is room for."""

    def looks_at(self, sequence: EngineSequence) -> bool:
        return True

    def waits_for(
        self, step: RunningStep, running: Sequence[EngineSequence], num_rows: int, max_num_drafts: int
    ) -> bool:
        return True

    def propose(self, sequence: EngineSequence, session: Session, step: PlanBuilder) -> tuple[int, ...]:
        room = room_for_drafts(sequence, session, step)
        return tuple(self.draft(sequence, room)) if room > 0 else ()

    @abstractmethod
    def draft(self, sequence: EngineSequence, max_num_tokens: int) -> list[int]:
        """The next tokens, at least one may be asked for."""
