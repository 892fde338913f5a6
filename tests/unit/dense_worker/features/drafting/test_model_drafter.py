"""Drafts of a draft model: when it runs, how many tokens it drafts, and what that costs, in simulated servers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest

from services.dense_worker.features.drafting.device_drafter import DraftRequest
from services.dense_worker.features.drafting.drafter import TRIAL_STEPS, Acceptance
from services.dense_worker.features.drafting.kv_cache.draft_blocks import MAX_LATE_TOKENS
from services.dense_worker.features.drafting.measured_drafting import MeasuredDrafting
from services.dense_worker.features.drafting.model_drafter import ModelDrafter, ModelPredictor
from services.dense_worker.features.drafting.step_costs import StepCosts
from services.step import StepPlan, StepResult
from tests.support.dense import scheduler_cluster
from tests.support.dense.scheduler_cluster import expected_output, make_sequence
from tests.unit.dense_worker.features.drafting.medusa.test_medusa_drafter import (
    NO_DEVICE,
    IsRight,
    always,
    mostly,
    never,
    seldom,
)
from tests.unit.dense_worker.features.drafting.test_measured_drafting import COSTS, TimedCluster, unpredictable

NUM_TOKENS, CATCH_UP_TOKENS = 7, 64


@dataclass(frozen=True)
class DraftCosts:
    """In seconds; a step of the served model takes 1."""

    round_s: float  # a draft for each sequence
    token_s: float  # of each further token, in a round or of a prompt


DRAFT_COSTS = {"gpu": DraftCosts(0.1, 0.0005), "cpu": DraftCosts(0.1, 0.02), "dear": DraftCosts(0.3, 0.09)}


class DraftingCluster(TimedCluster):
    """A server with a draft model, which first computes the tokens of a sequence. Some sequences have no room."""

    def __init__(
        self, drafting: MeasuredDrafting | None, costs: str, is_right: IsRight, without_room: frozenset[int]
    ) -> None:
        super().__init__(drafting, *COSTS[costs], num_blocks=800, max_model_len=256)
        self._draft_costs, self._is_right, self._without_room = DRAFT_COSTS[costs], is_right, without_room
        self._num_cached: dict[int, int] = {}
        self._draft_s = 0.0
        self.num_runs: list[int] = []  # numbers of tokens that the draft model was asked for

    def draft_s(self) -> float:
        return self._draft_s

    def duration_s(self, plan: StepPlan) -> float:
        return super().duration_s(plan) + self._draft_s

    def result_of(self, plan: StepPlan) -> StepResult:
        result = super().result_of(plan)
        self._draft_s = 0.0
        if isinstance(self.follow_up, DraftRequest):
            self.follow_up.token_ids = self._draft(plan, result, self.follow_up.num_tokens)
        return result

    def _draft(self, plan: StepPlan, result: StepResult, num_tokens: int) -> dict[int, list[int]]:
        drafts = dict[int, list[int]]()
        self.num_runs.append(num_tokens)
        num_left, num_ready, num_rows = CATCH_UP_TOKENS, 0, 0
        for entry, token_ids in zip(plan.entries, result.token_ids.rows(), strict=True):
            if not token_ids or entry.seq_id in self._without_room:
                continue
            num_known = entry.position + entry.num_tokens - len(entry.draft_token_ids)
            num_late = num_known - self._num_cached.get(entry.seq_id, 0)
            if num_late > MAX_LATE_TOKENS:
                num_computed = min(num_left, num_late)
                num_left, num_late, num_rows = num_left - num_computed, num_late - num_computed, num_rows + num_computed
            self._num_cached[entry.seq_id] = num_known - num_late
            if num_late > MAX_LATE_TOKENS:
                drafts[entry.seq_id] = []
                continue
            num_ready += 1
            num_rows += num_late + len(entry.draft_token_ids)
            first = self._num_cached[entry.seq_id] = num_known + len(token_ids)
            drafts[entry.seq_id] = [
                scheduler_cluster.next_token(entry.seq_id, first + place)
                + (not self._is_right(entry.seq_id, first + place, place // 2))
                for place in range(num_tokens)
            ]
        costs = self._draft_costs
        rounds_s = num_tokens * (costs.round_s + costs.token_s * (num_ready - 1)) if num_ready else 0.0
        self._draft_s = rounds_s + costs.token_s * num_rows
        return drafts


def make_drafting() -> MeasuredDrafting:
    return MeasuredDrafting(ModelDrafter(NO_DEVICE, NUM_TOKENS, MAX_LATE_TOKENS), NUM_TOKENS, StepCosts(32, 64))


def run(
    monkeypatch: pytest.MonkeyPatch,
    is_right: IsRight,
    drafting: MeasuredDrafting | None,
    costs: str,
    num_seqs: int = 1,
    prompt_len: int = 20,
    num_answers: int = 16,
    without_room: frozenset[int] = frozenset(),
) -> DraftingCluster:
    """Answers of 60 tokens each, `num_seqs` at a time; their texts cannot be copied."""
    monkeypatch.setattr(scheduler_cluster, "next_token", unpredictable)
    cluster = DraftingCluster(drafting, costs, is_right, without_room)
    for seq_id in range(1, 1 + num_answers):
        cluster.scheduler.add(make_sequence(seq_id, prompt_len, 60))
        while cluster.scheduler.num_running + cluster.scheduler.num_waiting >= num_seqs:
            cluster.step()
    cluster.run_until_idle()
    for output in cluster.outputs:
        assert output.sequence.output_token_ids == expected_output(output.sequence)
    return cluster


@pytest.mark.parametrize("prompt_len", [20, 150])
@pytest.mark.parametrize("num_seqs", [1, 4])
def test_right_drafts_save_steps_and_time(monkeypatch: pytest.MonkeyPatch, num_seqs: int, prompt_len: int) -> None:
    off = run(monkeypatch, always, None, "gpu", num_seqs, prompt_len)
    on = run(monkeypatch, always, make_drafting(), "gpu", num_seqs, prompt_len)
    assert len(on.plans) < 0.7 * len(off.plans) and on.time_s < 0.9 * off.time_s
    counts = on.counts
    assert counts.num_accepted_tokens == counts.num_draft_tokens > 0


def test_drafts_that_are_mostly_right_are_few_and_save_time(monkeypatch: pytest.MonkeyPatch) -> None:
    off = run(monkeypatch, mostly, None, "gpu")
    on = run(monkeypatch, mostly, make_drafting(), "gpu")
    assert on.time_s < 0.95 * off.time_s
    right = run(monkeypatch, always, make_drafting(), "gpu")
    assert sum(on.num_runs) / len(on.num_runs) < sum(right.num_runs) / len(right.num_runs)


@pytest.mark.parametrize(("num_seqs", "prompt_len", "num_answers"), [(1, 150, 6), (6, 20, 10)])
@pytest.mark.parametrize("is_right", [always, mostly, seldom, never])
@pytest.mark.parametrize("costs", COSTS)
def test_it_is_never_more_than_3_percent_slower(
    monkeypatch: pytest.MonkeyPatch, costs: str, is_right: IsRight, num_seqs: int, prompt_len: int, num_answers: int
) -> None:
    drafting = make_drafting()
    parameters = costs, num_seqs, prompt_len, num_answers
    run(monkeypatch, is_right, drafting, *parameters)  # it learns what drafts and steps are worth
    on = run(monkeypatch, is_right, drafting, *parameters)
    assert on.time_s <= 1.03 * time_without_drafts(*parameters)


@cache
def time_without_drafts(costs: str, num_seqs: int, prompt_len: int, num_answers: int) -> float:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return run(monkeypatch, never, None, costs, num_seqs, prompt_len, num_answers).time_s


def test_a_model_that_is_always_wrong_runs_now_and_then_only(monkeypatch: pytest.MonkeyPatch) -> None:
    drafting = make_drafting()
    for _ in range(3):
        later = run(monkeypatch, never, drafting, "gpu")
    assert not any(plan.entries.drafts for plan in later.plans)
    assert 0 < len(later.num_runs) <= len(later.plans) / TRIAL_STEPS + 1


def test_a_model_that_becomes_right_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    drafting = make_drafting()
    for _ in range(3):
        before = run(monkeypatch, never, drafting, "gpu")
    assert not any(plan.entries.drafts for plan in before.plans)
    for _ in range(60):
        if any(plan.entries.drafts for plan in run(monkeypatch, always, drafting, "gpu", num_seqs=8).plans):
            return
    raise AssertionError("the draft model was never used again")


def test_sequences_without_room_do_not_keep_the_model_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    on = run(monkeypatch, always, make_drafting(), "gpu", without_room=frozenset(range(1, 17)))
    assert not any(plan.entries.drafts for plan in on.plans)
    assert len(on.num_runs) <= len(on.plans) / TRIAL_STEPS + 1 + 16, "once for each sequence, and for trials"


def test_drafts_are_expected_only_while_the_model_has_the_tokens() -> None:
    predictor = ModelPredictor(Acceptance(0.5, 0.8).begin(), 3, 0, MAX_LATE_TOKENS)
    assert predictor.needs_tokens and predictor.next_chances(9) == []
    predictor.ask()
    assert not predictor.needs_tokens, "it waits for the answer"
    predictor.take([])
    assert predictor.needs_tokens and predictor.next_chances(9) == []
    predictor.ask()
    predictor.take([7, 8, 9])
    assert not predictor.needs_tokens and predictor.next_chances(9) == pytest.approx([0.5, 0.4, 0.32])
    output = [7] * MAX_LATE_TOKENS
    predictor.follow(output)
    assert predictor.is_ready
    predictor.follow([*output, 7])
    assert predictor.needs_tokens and predictor.next_chances(9) == []


def test_a_head_has_all_tokens_unless_it_has_no_room() -> None:
    predictor = ModelPredictor(Acceptance(0.5, 0.8).begin(), 3, 0, max_late_tokens=None)
    assert predictor.needs_tokens and predictor.next_chances(9) == []
    predictor.ask()
    predictor.take([7, 8, 9])
    predictor.follow([7] * 10 * MAX_LATE_TOKENS)
    assert predictor.is_ready
    predictor.ask()
    assert predictor.is_ready, "it is being answered"
    predictor.ask()
    assert not predictor.is_ready and not predictor.needs_tokens, "nobody has answered"
    predictor.take([7])
    assert predictor.is_ready
