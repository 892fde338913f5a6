"""`RankAnswers`: the answers of all ranks' attention workers, as if one had given them.

The workers get the same plans and mostly answer alike. They differ after a death: one has lost its cache, or was a step
behind the others. Then a sequence is opened again where more of it is cached than elsewhere. The number of free blocks
is the smallest of all.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from services.common.errors import PeerError
from services.step import NewSequence, PlanAccepted, SequenceOpened, StepPlan


class Reopening(NamedTuple):
    """A sequence that one rank's attention worker has to open again."""

    rank: int
    new: NewSequence


@dataclass(slots=True)
class _Opening:
    new: NewSequence
    answers: dict[int, SequenceOpened] = field(default_factory=dict)  # the last of each rank
    num_freed: list[int] = field(default_factory=list)  # by rank: blocks that came back, less those that were taken


class RankAnswers:
    """Lives as long as an attachment. Used on the event loop; `note_plan` is called before the plan is sent."""

    def __init__(self, num_free_blocks: SequenceOf[int]) -> None:
        """By rank, at the beginning of the attachment."""
        self._num_free = list(num_free_blocks)
        self._openings: dict[int, _Opening] = {}  # by seq_id
        self._freeing: dict[int, dict[int, PlanAccepted]] = {}  # by step_id: answers so far, by rank
        self._failed: set[int] = set()  # steps whose errors have been passed on, and that free nothing

    @property
    def num_free_blocks(self) -> int:
        """Blocks that are free on all ranks."""
        return min(self._num_free)

    def note_plan(self, plan: StepPlan) -> None:
        """All ranks will answer what it opens, and whether it frees blocks."""
        for new in plan.new_sequences:
            self._openings[new.seq_id] = _Opening(new, num_freed=[0] * len(self._num_free))
        if plan.frees_blocks:
            self._freeing[plan.step_id] = {}

    def opened(self, rank: int, answer: SequenceOpened) -> SequenceOpened | list[Reopening]:
        """Takes an answer. Returns that of all ranks, or what must be opened again before that; mostly nothing yet.

        Raises `PeerError` if only some ranks have opened the sequence.
        """
        opening = self._openings[answer.seq_id]
        opening.answers[rank] = answer
        opening.num_freed[rank] += answer.num_freed_blocks - answer.num_pinned_blocks
        if len(opening.answers) < len(self._num_free):
            return []
        answers = [opening.answers[each] for each in range(len(self._num_free))]
        failed = [each for each in answers if each.error is not None]
        if failed:
            if len(failed) < len(answers):
                raise PeerError(f"only some ranks have opened sequence {answer.seq_id:x}: {failed[0].error}")
            del self._openings[answer.seq_id]
            return failed[0]
        least = min(each.num_cached_tokens for each in answers)
        again = [index for index, each in enumerate(answers) if each.num_cached_tokens > least]
        if again:
            for index in again:
                del opening.answers[index]
            new = replace(opening.new, max_cached_tokens=least)
            return [Reopening(index, new) for index in again]
        del self._openings[answer.seq_id]
        change = self._add(opening.num_freed)
        return replace(answers[0], num_freed_blocks=max(0, change), num_pinned_blocks=max(0, -change))

    def accepted(self, rank: int, answer: PlanAccepted) -> PlanAccepted | None:
        """Takes an answer. Returns that of all ranks; None: it has been given, or not all are here."""
        answers = self._freeing.get(answer.step_id)
        if answers is None:  # it has errors, which are the same on all ranks, and must be known at once
            is_first = answer.step_id not in self._failed
            self._failed.add(answer.step_id)
            return answer if is_first else None
        answers[rank] = answer
        if len(answers) < len(self._num_free):
            return None
        del self._freeing[answer.step_id]
        change = self._add(answers[index].num_freed_blocks for index in range(len(answers)))
        errors = {seq_id: error for each in answers.values() for seq_id, error in (each.errors or {}).items()}
        return PlanAccepted(answer.step_id, change, self.num_free_blocks, errors)

    def _add(self, num_freed: Iterable[int]) -> int:
        """Counts blocks of each rank; returns how many more are free on all."""
        before = self.num_free_blocks
        self._num_free = [free + more for free, more in zip(self._num_free, num_freed, strict=True)]
        return self.num_free_blocks - before
