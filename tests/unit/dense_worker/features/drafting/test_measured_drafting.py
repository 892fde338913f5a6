"""Which steps get drafts: simulated servers with given costs of steps, and texts of every kind."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.dense_worker.engine.limits import Policy
from services.dense_worker.engine.observer import StepStats
from services.dense_worker.engine.session import ScheduledStep
from services.dense_worker.features.drafting.drafter import Acceptance
from services.dense_worker.features.drafting.drafting import DraftCounts
from services.dense_worker.features.drafting.measured_drafting import MeasuredDrafting
from services.dense_worker.features.drafting.ngram.answer_history import AnswerHistory
from services.dense_worker.features.drafting.ngram.ngram_predictor import NgramDrafter, NgramPredictor
from services.dense_worker.features.drafting.step_costs import MAX_LOSS_STEPS, MAX_STEPS, SHARE, StepCosts
from services.step import StepPlan
from tests.support.dense import scheduler_cluster
from tests.support.dense.scheduler_cluster import (
    Cluster,
    check_outputs,
    expected_output,
    make_sequence,
    requests,
    run_arrivals,
)
from tests.support.dense.sequences import ask
from tests.support.examples import examples

LENGTHS = (2, 3)
NUM_ANSWERS = 16
Text = Callable[[int, int], int]  # the token of a sequence at a position


def repeating(seq_id: int, position: int) -> int:
    return position % 20


def unpredictable(seq_id: int, position: int) -> int:
    return ((seq_id * 7919 + position * 104729) * 2654435761 >> 13) % 1009


def misleading(seq_id: int, position: int) -> int:
    """The same n-grams come again and again, and what follows them is always something else."""
    return (1, 2, 3)[position % 4] if position % 4 < 3 else 4 + unpredictable(seq_id, position)


def changing(seq_id: int, position: int) -> int:
    """Long copies between parts without any."""
    return (repeating if position // 50 % 2 else unpredictable)(seq_id, position)


class TimedCluster(Cluster):
    """Knows the cost of each step, of which it tells what decides about drafts."""

    def __init__(self, drafting: MeasuredDrafting | None, late_s: float, token_s: float, **sizes: int) -> None:
        """A step costs 1 s, `token_s` for each further token, and `late_s` if it is not planned ahead."""
        sizes = {"num_blocks": 320, "max_num_seqs": 32, "max_num_batched_tokens": 64} | sizes
        super().__init__(drafting=drafting, **sizes)
        self.time_s = 0.0
        self.counts = DraftCounts() if drafting is None else drafting.counts
        self._late_s, self._token_s = late_s, token_s
        self._drafting = drafting
        self._is_ahead = {1: False}  # by step_id

    def check(self, plan: StepPlan) -> None:
        super().check(plan)
        self._is_ahead[plan.step_id] = self.in_flight is not None

    def duration_s(self, plan: StepPlan) -> float:
        return 1.0 + self._token_s * (plan.num_tokens - 1)

    def draft_s(self) -> float:
        """The part of the newest step's duration in which later tokens were drafted."""
        return 0.0

    def _complete(self, published: ScheduledStep) -> None:
        num_outputs = len(self.outputs)
        super()._complete(published)
        plan = published.plan
        if not plan.entries:
            return
        is_ahead = self._is_ahead[plan.step_id]
        duration_s = self.duration_s(plan)
        self.time_s += duration_s + (0.0 if is_ahead else self._late_s)
        if self._drafting is not None:
            fields = dict.fromkeys(StepStats.__dataclass_fields__, 0)
            num_sampled = sum(entry.num_logits for entry in plan.entries)
            given = {
                "num_seqs": len(plan.entries),
                "num_tokens": plan.num_tokens,
                "num_sampled": num_sampled,
                "num_output_tokens": sum(len(output.token_ids) for output in self.outputs[num_outputs:]),
                "num_running": self.scheduler.num_running,
                "gap_s": 0.0 if is_ahead else self._late_s,
                "duration_s": duration_s,
                "follow_up_s": self.draft_s(),
            }
            self._drafting.on_step(StepStats(**(fields | given)), (), self.outputs[num_outputs:])


def make_drafting(max_num_seqs: int = 32, history: AnswerHistory | None = None) -> MeasuredDrafting:
    return MeasuredDrafting(NgramDrafter(LENGTHS, history), 7, StepCosts(max_num_seqs, 64))


def run(
    monkeypatch: pytest.MonkeyPatch,
    text: Text,
    num_seqs: int,
    drafting: MeasuredDrafting | None,
    *costs: float,
    num_answers: int = NUM_ANSWERS,
) -> TimedCluster:
    """Answers of 44 tokens each, `num_seqs` at a time."""
    monkeypatch.setattr(scheduler_cluster, "next_token", text)
    cluster = TimedCluster(drafting, *costs)
    for seq_id in range(1, 1 + num_answers):
        sequence = make_sequence(seq_id, 20, 44)
        ask(sequence, prompt_token_ids=[text(seq_id, position) for position in range(20)])
        cluster.scheduler.add(sequence)
        while cluster.scheduler.num_running + cluster.scheduler.num_waiting >= num_seqs:
            cluster.step()
    cluster.run_until_idle()
    return cluster


# As on the H200, where 4 rows cost hardly more than 1; as on a CPU, where tokens cost; and where drafts never pay.
COSTS = {"gpu": (0.37, 0.005), "cpu": (0.1, 0.2), "dear": (0.5, 0.9)}
TEXTS = {"repeating": repeating, "unpredictable": unpredictable, "misleading": misleading, "changing": changing}


@pytest.mark.parametrize(("num_seqs", "num_answers"), [(1, 8), (12, 16)])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("costs", COSTS)
def test_it_is_never_more_than_3_percent_slower(
    monkeypatch: pytest.MonkeyPatch, costs: str, text: str, num_seqs: int, num_answers: int
) -> None:
    def time_with(drafting: MeasuredDrafting | None) -> float:
        cluster = run(monkeypatch, TEXTS[text], num_seqs, drafting, *COSTS[costs], num_answers=num_answers)
        assert {output.sequence.seq_id for output in cluster.outputs} == set(range(1, 1 + num_answers))
        return cluster.time_s

    drafting = make_drafting()
    time_with(drafting)  # it learns the costs of steps once
    off_s = time_with(None)
    assert time_with(drafting) <= 1.03 * off_s


def test_one_copied_text_does_not_make_the_others_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its drafts would give more tokens per second together, but seven sequences would wait longer for each token."""

    def text(seq_id: int, position: int) -> int:
        return (repeating if seq_id % 8 == 1 else unpredictable)(seq_id, position)

    drafting = make_drafting()
    run(monkeypatch, text, 8, drafting, *COSTS["cpu"])
    full = [plan for plan in run(monkeypatch, text, 8, drafting, *COSTS["cpu"]).plans if len(plan.entries) == 8]
    assert full and not any(plan.entries.drafts for plan in full)


def test_copies_are_fast_where_tokens_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_seqs in (1, 4):
        off = run(monkeypatch, repeating, num_seqs, None, *COSTS["gpu"])
        on = run(monkeypatch, repeating, num_seqs, make_drafting(), *COSTS["gpu"])
        assert off.time_s > 2.0 * on.time_s
    assert on.counts.num_accepted_tokens > 0.8 * on.counts.num_draft_tokens


def test_many_drafts_are_tried_where_few_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """To wait costs as much as a step, and tokens cost hardly anything: 4 drafts for 8 sequences lose time, 24 win."""
    drafting = make_drafting()
    run(monkeypatch, repeating, 8, drafting, 1.0, 0.001)
    off = run(monkeypatch, repeating, 8, None, 1.0, 0.001)
    on = run(monkeypatch, repeating, 8, drafting, 1.0, 0.001)
    assert on.time_s < 0.75 * off.time_s


def test_without_matches_every_step_is_planned_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    off = run(monkeypatch, unpredictable, 1, None, *COSTS["gpu"])
    on = run(monkeypatch, unpredictable, 1, make_drafting(), *COSTS["gpu"])
    assert on.time_s == off.time_s and not any(plan.entries.drafts for plan in on.plans)


def test_earlier_answers_help_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """All answers are the same, and no answer repeats itself."""
    monkeypatch.setattr(scheduler_cluster, "next_token", lambda seq_id, position: unpredictable(1, position))
    history = AnswerHistory(LENGTHS, 2**14)
    cluster = TimedCluster(make_drafting(history=history), *COSTS["gpu"])
    num_steps = []
    for seq_id in range(1, 9):
        sequence = make_sequence(seq_id, 20, 44)
        ask(sequence, prompt_token_ids=[unpredictable(1, position) for position in range(20)])
        before = cluster.scheduler.num_steps
        cluster.scheduler.add(sequence)
        cluster.run_until_idle()
        assert sequence.output_token_ids == expected_output(sequence)
        num_steps.append(cluster.scheduler.num_steps - before)
    assert num_steps[-1] < 0.4 * num_steps[0]


@settings(max_examples=examples(40), deadline=None)
@given(
    requests,
    st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
    st.integers(16, 40),
    st.integers(1, 6),
    st.integers(6, 40),
    st.booleans(),
    st.sets(st.integers(1, 40), max_size=3),
)
def test_every_sequence_gets_its_tokens(
    arrivals: list[tuple[int, int, bool, int, int | None]],
    policy: Policy,
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    has_history: bool,
    resets: set[int],
) -> None:
    """With early stops, preemptions, new attachments, and cancelled sequences; their texts repeat every 11 tokens."""
    budget = max(budget, max_num_seqs)
    history = AnswerHistory(LENGTHS, 2**14) if has_history else None
    drafting = MeasuredDrafting(NgramDrafter(LENGTHS, history), 4, FreeSteps(max_num_seqs, budget))
    cluster = Cluster(policy, num_blocks, max_num_seqs, budget, drafting=drafting)
    check_outputs(*run_arrivals(cluster, arrivals, resets=resets))
    assert not drafting._predictors, "it keeps nothing of sequences that have ended"


@pytest.mark.parametrize("num_seqs", [1, 4])
@pytest.mark.parametrize("costs", ["gpu", "cpu"])
def test_wrong_drafts_that_seem_right_lose_no_more_than_the_budget(
    monkeypatch: pytest.MonkeyPatch, costs: str, num_seqs: int
) -> None:
    """Hardly a draft is right, but nothing is learned from that."""
    monkeypatch.setattr(Acceptance, "observe", lambda *_, **__: None)
    drafting = make_drafting()
    off_s = sum(run(monkeypatch, misleading, num_seqs, None, *COSTS[costs]).time_s for _ in range(3))
    on = [run(monkeypatch, misleading, num_seqs, drafting, *COSTS[costs]) for _ in range(3)]
    counts = on[0].counts
    assert counts.num_draft_tokens > 10 * counts.num_accepted_tokens
    # The budget may be spent by a step with drafts and the one after it, which has to wait, too.
    ahead_s = 1.0 + COSTS[costs][1] * (num_seqs - 1)
    assert sum(each.time_s for each in on) <= (1 + SHARE) * off_s + (MAX_STEPS + 2 * MAX_LOSS_STEPS) * ahead_s


def test_texts_are_looked_at_less_often_where_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look takes a tenth of a step."""
    clock, num_looks = itertools.count(), itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: 0.1 * next(clock))
    monkeypatch.setattr(NgramPredictor, "chances", lambda *_: [0.0][: next(num_looks) * 0])
    num_steps = len(run(monkeypatch, unpredictable, 1, make_drafting(), *COSTS["gpu"]).plans)
    assert 0 < next(num_looks) <= (SHARE * num_steps + MAX_STEPS) / 0.1 + 1


class FreeSteps(StepCosts):
    """Steps of every size cost the same, so that drafts always pay."""

    def cost(self, num_tokens: int, *, is_ahead: bool) -> float:
        return 1.0
