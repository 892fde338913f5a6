"""The scheduler with two lanes and the real KV cache accounting, without a model: tokens are a function of position."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.dense_worker.engine.limits import Policy
from services.dense_worker.engine.sequence import Sequence, SequenceStatus
from services.dense_worker.engine.session import ScheduledStep
from services.step import PlanAccepted, StepPlan
from tests.support.dense.scheduler_cluster import (
    WINDOWS,
    Cluster,
    check_outputs,
    expected_output,
    make_sequence,
    new_attachment,
    requests,
    run_arrivals,
)
from tests.support.examples import examples

NUM_LANES = 2


class LaneCluster(Cluster):
    """As the engines do it: plans change the cache as they come, and are committed in that order.

    The dense worker collects the oldest step, after it has planned the next one of the same lane.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.running: list[ScheduledStep] = []  # in both lanes, oldest first
        self.moved: list[tuple[Sequence, int]] = []
        self.use_lanes()

    def use_lanes(self) -> None:
        attachment = new_attachment(self.cache, is_empty=self.cache.is_empty)
        channels: Any = dict.fromkeys(range(NUM_LANES))
        self.scheduler.begin(dataclasses.replace(attachment, channels=channels))

    def attach_again(self) -> None:
        self.in_flight = None
        self.running.clear()
        self._opening.clear()
        self.cache.abort_steps()
        self.use_lanes()
        self.scheduler.close_orphans()

    def step(self, *, answer_opens: bool = True) -> None:
        scheduler, session = self.scheduler, self.scheduler.session
        oldest = self.running[0] if self.running else None
        self._opening.extend(each for each in scheduler.next_to_open() if each.status is SequenceStatus.OPENING)
        if answer_opens:
            self.answer_opens()
        if (move := session.dealer.end_move(session.rows)) is not None:
            self.moved.append(move)
            assert all(move[0].seq_id not in each.plan.entries.seq_ids for each in self.running)
        session.dealer.begin_move(session.rows)
        for lane in set(range(NUM_LANES)) - {each.plan.lane for each in self.running}:
            self._publish(lane)
        if oldest is not None:
            self._publish(oldest.plan.lane)
            self.cache.commit_step()
            self.running.remove(oldest)
            self.outputs += scheduler.update(oldest, self.result_of(oldest.plan))
        self.in_flight = self.running[0] if self.running else None
        self.check_ledger()

    def _publish(self, lane: int) -> None:
        published = self.scheduler.schedule(lane)
        if published is None:
            return
        plan = published.plan
        self.check_lane(plan)
        self.plans.append(plan)
        self.running.append(published)
        self.open_starting(plan)
        step = self.cache.plan_step(plan)
        assert not step.errors, "both sides must agree on lengths and blocks"
        if plan.frees_blocks:
            self.outputs += self.scheduler.accepted(PlanAccepted(plan.step_id, step.num_freed_blocks))

    def check_lane(self, plan: StepPlan) -> None:
        """A sequence is in one lane as long as a step with it is under way."""
        self.check(plan)
        under_way = {seq_id: each.plan.lane for each in self.running for seq_id in each.plan.entries.seq_ids.tolist()}
        assert all(under_way.get(seq_id, plan.lane) == plan.lane for seq_id in plan.entries.seq_ids.tolist())


@settings(max_examples=examples(100), deadline=None)
@given(
    requests,
    st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
    st.integers(16, 40),
    st.integers(2, 6),
    st.integers(6, 40),
    st.integers(1, 3),
    st.sets(st.integers(1, 40), max_size=3),
    WINDOWS,
)
def test_every_sequence_gets_its_tokens_and_every_block_is_freed(
    arrivals: list[tuple[int, int, bool, int, int | None]],
    policy: Policy,
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    answer_every: int,
    resets: set[int],
    kept: dict[str, int],
) -> None:
    cluster = LaneCluster(policy, num_blocks, max_num_seqs, budget, **kept)
    check_outputs(*run_arrivals(cluster, arrivals, answer_every, resets=resets))


def test_sequences_are_dealt_by_rows_and_by_tokens_of_context() -> None:
    cluster = LaneCluster(max_num_seqs=8, num_blocks=64)
    for seq_id, prompt_len in enumerate((40, 4, 4, 4, 4, 40), start=1):
        cluster.scheduler.add(make_sequence(seq_id, prompt_len, 20))
    for _ in range(4):
        cluster.step()
    lanes = {each.seq_id: each.lane for each in cluster.scheduler.session.running}
    assert lanes[1] != lanes[6], "the long contexts are apart"
    assert 2 <= sum(lanes.values()) <= 4, "and so are the short ones"
    plans = cluster.plans[-2:]
    assert {plan.lane for plan in plans} == {0, 1}
    cluster.run_until_idle()


def test_lanes_that_have_drifted_apart_are_evened_out() -> None:
    cluster = LaneCluster(max_num_seqs=8, num_blocks=100)
    sequences = [make_sequence(seq_id, 4, 40) for seq_id in range(1, 9)]
    for sequence in sequences:
        cluster.scheduler.add(sequence)
    for _ in range(6):
        cluster.step()
    first = [each.seq_id for each in sequences if each.lane == 0]
    assert len(first) == 4
    for seq_id in first[:3]:
        cluster.scheduler.cancel(seq_id)
    for _ in range(20):
        cluster.step()
    lanes = [each.lane for each in cluster.scheduler.session.running]
    assert sorted(lanes) in ([0, 0, 1, 1, 1], [0, 0, 0, 1, 1]) and cluster.moved
    cluster.run_until_idle()
    for sequence in sequences:
        if sequence.seq_id not in first[:3]:
            assert sequence.output_token_ids == expected_output(sequence)


def test_nobody_moves_between_lanes_that_are_even() -> None:
    cluster = LaneCluster(max_num_seqs=8, num_blocks=64)
    for seq_id in range(1, 6):
        cluster.scheduler.add(make_sequence(seq_id, 4 + seq_id, 20))
    cluster.run_until_idle()
    assert not cluster.moved


def test_a_suspect_runs_without_a_step_of_the_other_lane() -> None:
    cluster = LaneCluster(max_num_seqs=8, num_blocks=64)
    for seq_id in (1, 2):
        cluster.scheduler.add(make_sequence(seq_id, 4, 30))
    for _ in range(4):
        cluster.step()
    suspect = make_sequence(3, 4, 3)
    suspect.num_crashes = 2
    cluster.scheduler.add(suspect)
    for _ in range(12):
        cluster.step()
        lanes = {each.plan.lane for each in cluster.running if each.plan.entries}
        if any(3 in each.plan.entries.seq_ids for each in cluster.running) and suspect.is_suspect:
            assert len(lanes) == 1 and all(each.plan.entries.seq_ids.tolist() == [3] for each in cluster.running[-1:])
    cluster.run_until_idle()
    assert suspect.output_token_ids == expected_output(suspect)
