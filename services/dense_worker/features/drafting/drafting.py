"""`Drafting`: which steps have draft tokens, and which ones. Asked by the scheduler, on the engine thread.

A draft token may be the next one of a sequence, and a step verifies it: it is accepted if it equals the token that the
sampler chooses at its position. So drafts change only the number of steps, never the text. How many are accepted
decides the next position, and to draft takes all tokens. So a step with drafts is planned only after the previous step
has ended, and so is the step after it (bench/results/steps.md). All others are planned while the previous one runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

if TYPE_CHECKING:
    from services.dense_worker.engine.observer import StepStats
    from services.dense_worker.engine.plan_builder import PlanBuilder
    from services.dense_worker.engine.sequence import Sequence, SequenceOutput
    from services.dense_worker.engine.session import Session
    from services.dense_worker.runner.model_runner import RunningStep


class Drafting:
    """No step has drafts. Subclasses have some. An `EngineObserver`."""

    def __init__(self) -> None:
        self.counts = DraftCounts()  # of what steps have verified

    def looks_at(self, sequence: Sequence) -> bool:
        """Whether a sequence may get drafts now, so that it is planned by itself."""
        return False

    def begins_to_look(self, num_running: int, max_num_drafts: int) -> bool:
        """Whether `looks_at` says yes from now on of sequences of which it said no.

        Asked before `waits_for`. num_running: number of running sequences; max_num_drafts: that there is room for
        """
        return False

    def waits_for(
        self, step: RunningStep, running: SequenceOf[Sequence], num_rows: int, max_num_drafts: int
    ) -> bool:
        """Whether the next step is planned only when this one, which is under way, has ended.

        Asked once for each step, before it is collected; may ask for something to be done after the step.

        running: the sequences that are planned one by one; num_rows: number of the others, which get no drafts;
        max_num_drafts: that the next step may have
        """
        return False

    def begin_step(self, decodes: SequenceOf[Sequence], num_rows: int, max_num_drafts: int) -> None:
        """A step is planned now, with a token for each of these sequences and rows, and at most so many drafts.

        num_rows: number of sequences that are not planned one by one
        """

    def propose(self, sequence: Sequence, session: Session, step: PlanBuilder) -> tuple[int, ...]:
        """The drafts that follow the last tokens of a sequence in the step that is being planned."""
        return ()

    def finish(self, sequence: Sequence) -> None:
        """A sequence has ended, for whatever reason."""

    def on_step(self, stats: StepStats, started: Iterable[Sequence], outputs: Iterable[SequenceOutput]) -> None:
        """A step has ended, and its sequences have their tokens."""

    def on_handoff_abort(self) -> None:
        """The plans under way are void."""


@dataclass(slots=True, eq=False)
class DraftCounts:
    """Total counts, which `collect` reports to Prometheus when a scraper asks."""

    num_drafts: int = 0  # sequences with drafts in a step
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_at: list[int] = field(default_factory=lambda: [0])  # by place of the draft in its step

    def add(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Counts the drafts of a sequence in a step, at least one."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        self.num_accepted_at += [0] * (num_draft_tokens - len(self.num_accepted_at))
        for place in range(num_accepted_tokens):
            self.num_accepted_at[place] += 1

    def collect(self) -> Iterator[Metric]:
        """The metrics. Called on the scraper's thread."""
        yield CounterMetricFamily(
            "twostroke_dense_spec_decode_num_drafts",
            "Sequences that got drafts in a step, once for each such step.",
            self.num_drafts,
        )
        yield CounterMetricFamily(
            "twostroke_dense_spec_decode_num_draft_tokens", "Drafts that steps have verified.", self.num_draft_tokens
        )
        yield CounterMetricFamily(
            "twostroke_dense_spec_decode_num_accepted_tokens", "Drafts that were right.", self.num_accepted_tokens
        )
        at_place = CounterMetricFamily(
            "twostroke_dense_spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were right, by their place among the drafts of their step; the first is 0.",
            labels=["position"],
        )
        for place, num_accepted in enumerate(self.num_accepted_at):
            at_place.add_metric([str(place)], num_accepted)
        yield at_place
