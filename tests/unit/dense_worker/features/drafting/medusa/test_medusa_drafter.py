"""Drafts of heads: when they run, which steps get drafts, and what that costs, in simulated servers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.sampling_params import SamplingParams
from services.dense_worker.engine.limits import Policy
from services.dense_worker.engine.observer import StepStats
from services.dense_worker.engine.session import ScheduledStep
from services.dense_worker.features.drafting.device_drafter import DraftRequest
from services.dense_worker.features.drafting.drafter import TRIAL_STEPS, Acceptance, DevicePredictor, ForcedTokens
from services.dense_worker.features.drafting.measured_drafting import MeasuredDrafting
from services.dense_worker.features.drafting.medusa.medusa_drafter import MedusaDrafter
from services.dense_worker.features.drafting.step_costs import StepCosts
from services.dense_worker.runner.step_hook import FollowUp
from services.step import StepPlan, StepResult
from tests.support.dense import scheduler_cluster
from tests.support.dense.scheduler_cluster import check_outputs, expected_output, make_sequence, requests, run_arrivals
from tests.support.dense.sequences import ask
from tests.support.examples import examples
from tests.unit.dense_worker.features.drafting.test_measured_drafting import (
    COSTS,
    FreeSteps,
    TimedCluster,
    unpredictable,
)

NUM_HEADS = 4
NO_DEVICE: Any = object()  # simulated servers run no heads
IsRight = Callable[[int, int, int], bool]  # whether the draft of a head for a sequence and a position is right


def always(seq_id: int, position: int, head: int) -> bool:
    return True


def never(seq_id: int, position: int, head: int) -> bool:
    return False


def mostly(seq_id: int, position: int, head: int) -> bool:
    """Later heads are worse, as trained ones are."""
    return (position * 7 + head * 3 + seq_id) % 10 < 8 - 2 * head


def seldom(seq_id: int, position: int, head: int) -> bool:
    return (position * 7 + head * 3 + seq_id) % 10 == 0


class HeadsOfCluster:
    """The part of the model runner that has to do with heads."""

    def __init__(self, is_right: IsRight) -> None:
        self._is_right = is_right
        self.num_runs = 0  # steps after which the heads ran

    def run(self, plan: StepPlan, result: StepResult, follow_up: FollowUp | None) -> None:
        if isinstance(follow_up, DraftRequest):
            follow_up.token_ids = drafts_after(plan, result, self._is_right)
            self.num_runs += 1


class HeadsCluster(TimedCluster):
    """A server whose model has heads. Their run makes a step longer."""

    def __init__(
        self, drafting: MeasuredDrafting | None, late_s: float, token_s: float, heads_s: float, is_right: IsRight
    ) -> None:
        super().__init__(drafting, late_s, token_s)
        self._heads_s = heads_s
        self.heads = HeadsOfCluster(is_right)

    def duration_s(self, plan: StepPlan) -> float:
        return super().duration_s(plan) + self.draft_s()

    def draft_s(self) -> float:
        return self._heads_s * (self.follow_up is not None)

    def result_of(self, plan: StepPlan) -> StepResult:
        result = super().result_of(plan)
        self.heads.run(plan, result, self.follow_up)
        return result


def drafts_after(plan: StepPlan, result: StepResult, is_right: IsRight) -> dict[int, list[int]]:
    """Of all heads, for the tokens after those of the step."""
    found: dict[int, list[int]] = {}
    for entry, token_ids in zip(plan.entries, result.token_ids.rows(), strict=True):
        if token_ids:
            first = entry.position + entry.num_tokens - entry.num_logits + 1 + len(token_ids)
            right = [scheduler_cluster.next_token(entry.seq_id, first + head) for head in range(NUM_HEADS)]
            found[entry.seq_id] = [
                token_id if is_right(entry.seq_id, first + head, head) else token_id + 1
                for head, token_id in enumerate(right)
            ]
    return found


def make_drafting() -> MeasuredDrafting:
    return MeasuredDrafting(MedusaDrafter(NO_DEVICE, NUM_HEADS), 7, StepCosts(32, 64))


def run(
    monkeypatch: pytest.MonkeyPatch,
    is_right: IsRight,
    drafting: MeasuredDrafting | None,
    costs: tuple[float, float],
    heads_s: float = 0.1,
    num_seqs: int = 1,
    num_answers: int = 16,
) -> HeadsCluster:
    """Answers of 44 tokens each, `num_seqs` at a time; their texts cannot be copied."""
    monkeypatch.setattr(scheduler_cluster, "next_token", unpredictable)
    cluster = HeadsCluster(drafting, *costs, heads_s, is_right)
    for seq_id in range(1, 1 + num_answers):
        cluster.scheduler.add(make_sequence(seq_id, 20, 44))
        while cluster.scheduler.num_running + cluster.scheduler.num_waiting >= num_seqs:
            cluster.step()
    cluster.run_until_idle()
    for output in cluster.outputs:
        assert output.sequence.output_token_ids == expected_output(output.sequence)
    return cluster


@pytest.mark.parametrize("num_seqs", [1, 4])
def test_right_drafts_save_steps_and_time(monkeypatch: pytest.MonkeyPatch, num_seqs: int) -> None:
    off = run(monkeypatch, always, None, COSTS["gpu"], num_seqs=num_seqs)
    on = run(monkeypatch, always, make_drafting(), COSTS["gpu"], num_seqs=num_seqs)
    assert len(on.plans) < 0.5 * len(off.plans) and on.time_s < 0.6 * off.time_s
    counts = on.counts
    assert counts.num_accepted_tokens == counts.num_draft_tokens > 0
    assert max(len(entry.draft_token_ids) for plan in on.plans for entry in plan.entries) == NUM_HEADS


def test_drafts_that_are_mostly_right_save_time(monkeypatch: pytest.MonkeyPatch) -> None:
    off = run(monkeypatch, mostly, None, COSTS["gpu"])
    on = run(monkeypatch, mostly, make_drafting(), COSTS["gpu"])
    assert on.time_s < 0.9 * off.time_s
    counts = on.counts
    assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens


@pytest.mark.parametrize(("num_seqs", "num_answers"), [(1, 8), (12, 16)])
@pytest.mark.parametrize("is_right", [always, mostly, seldom, never])
@pytest.mark.parametrize("costs", COSTS)
def test_it_is_never_more_than_3_percent_slower(
    monkeypatch: pytest.MonkeyPatch, costs: str, is_right: IsRight, num_seqs: int, num_answers: int
) -> None:
    drafting, sizes = make_drafting(), {"num_seqs": num_seqs, "num_answers": num_answers}
    run(monkeypatch, is_right, drafting, COSTS[costs], **sizes)  # it learns what heads and steps are worth
    on = run(monkeypatch, is_right, drafting, COSTS[costs], **sizes)
    assert on.time_s <= 1.03 * time_without_drafts(costs, **sizes)


@cache
def time_without_drafts(costs: str, num_seqs: int, num_answers: int) -> float:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return run(monkeypatch, never, None, COSTS[costs], num_seqs=num_seqs, num_answers=num_answers).time_s


def test_heads_that_are_always_wrong_run_now_and_then_only(monkeypatch: pytest.MonkeyPatch) -> None:
    drafting = make_drafting()
    for _ in range(3):
        later = run(monkeypatch, never, drafting, COSTS["gpu"])
    assert not any(plan.entries.drafts for plan in later.plans)
    assert 0 < later.heads.num_runs <= len(later.plans) / TRIAL_STEPS + 1


def test_heads_that_become_right_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the texts change to those that the heads were trained with."""
    drafting = make_drafting()
    for _ in range(3):
        before = run(monkeypatch, never, drafting, COSTS["gpu"])
    assert not any(plan.entries.drafts for plan in before.plans)
    for _ in range(40):
        if any(plan.entries.drafts for plan in run(monkeypatch, always, drafting, COSTS["gpu"], num_seqs=8).plans):
            return
    raise AssertionError("the heads were never used again")


def test_sequences_that_may_have_no_drafts_use_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_cluster, "next_token", unpredictable)
    drafting = MeasuredDrafting(MedusaDrafter(NO_DEVICE, NUM_HEADS), 7, FreeSteps(32, 64))
    cluster = HeadsCluster(drafting, *COSTS["gpu"], 0.1, always)
    sequences = [make_sequence(seq_id, 3, 40) for seq_id in (1, 2)]
    ask(sequences[0], sampling=SamplingParams(repetition_penalty=1.1))
    for sequence in sequences:
        cluster.scheduler.add(sequence)
    cluster.run_until_idle()
    drafted = {entry.seq_id for plan in cluster.plans for entry in plan.entries if entry.draft_token_ids}
    assert drafted == {2}
    assert [sequence.output_token_ids for sequence in sequences] == [expected_output(each) for each in sequences]


def test_heads_do_not_run_for_drafts_that_a_form_forces() -> None:
    """A step is held back for those, too, but no running sequence could use what the heads draft."""
    drafter, matcher = MedusaDrafter(NO_DEVICE, NUM_HEADS), NO_DEVICE
    formed, free = ForcedTokens(matcher, Acceptance()), DevicePredictor(Acceptance(), NUM_HEADS, 0)
    assert not any(drafter.request([formed], is_held_back=True) for _ in range(3 * TRIAL_STEPS))
    requests = [drafter.request([formed, free], is_held_back=False) for _ in range(3 * TRIAL_STEPS)]
    assert sum(request is not None for request in requests) == 3


@settings(max_examples=examples(60), deadline=None)
@given(
    requests,
    st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
    st.integers(16, 40),
    st.integers(1, 6),
    st.integers(6, 40),
    st.sampled_from([always, mostly, never]),
    st.sets(st.integers(1, 40), max_size=3),
)
def test_every_sequence_gets_its_tokens(
    arrivals: list[tuple[int, int, bool, int, int | None]],
    policy: Policy,
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    is_right: IsRight,
    resets: set[int],
) -> None:
    """With early stops, preemptions, new attachments, and cancelled sequences."""

    class Server(scheduler_cluster.Cluster):
        def result_of(self, plan: StepPlan) -> StepResult:
            result = super().result_of(plan)
            heads.run(plan, result, self.follow_up)
            return result

        def _complete(self, published: ScheduledStep) -> None:
            super()._complete(published)
            drafting.on_step(StepStats(**dict.fromkeys(StepStats.__dataclass_fields__, 0)), (), ())

    budget = max(budget, max_num_seqs)
    drafting = MeasuredDrafting(MedusaDrafter(NO_DEVICE, NUM_HEADS), 3, FreeSteps(max_num_seqs, budget))
    heads = HeadsOfCluster(is_right)
    cluster = Server(policy, num_blocks, max_num_seqs, budget, drafting=drafting)
    check_outputs(*run_arrivals(cluster, arrivals, resets=resets))
    assert max((len(each.draft_token_ids) for plan in cluster.plans for each in plan.entries), default=0) <= 3


def test_drafts_that_came_true_are_followed_by_the_rest() -> None:
    acceptance = Acceptance(0.5, 0.8).begin()
    predictor = DevicePredictor(acceptance, NUM_HEADS, 2)
    output = [1, 2]
    assert predictor.chances(4) == [] and predictor.draft(4) == []
    assert predictor.next_chances(9) == pytest.approx([0.5 * 0.8**place for place in range(NUM_HEADS)])
    predictor.take([7, 8, 9, 10])
    assert predictor.chances(9) == pytest.approx([0.5 * 0.8**place for place in range(4)])
    assert predictor.draft(3) == [7, 8, 9]
    predictor.follow([*output, 7, 8])
    assert predictor.draft(9) == [9, 10]
    assert predictor.chances(9) == pytest.approx([acceptance.later, acceptance.later**2])
    assert acceptance.first > 0.5 and acceptance.later > 0.8
    predictor.follow([*output, 7, 8, 5])
    assert predictor.draft(9) == [] and acceptance.later < 0.825
    predictor.take([1])
    predictor.follow([*output, 7, 8, 5, 1, 4])
    assert predictor.draft(9) == []
