"""Steps of many streams with prompts of others: their rows fill the tiles of products where more prompts wait."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.dense_worker.engine.scheduler import Scheduler
from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.engine.step_planner import TILE_ROWS
from services.step import StepPlan
from tests.support.dense.scheduler_cluster import Cluster, expected_output, make_sequence, new_attachment
from tests.support.dense.sequences import ask
from tests.support.examples import examples
from tests.unit.dense_worker.engine.test_prompt_pace import TimedCluster, num_prompt_tokens

BUDGET = 1024


class LargeCluster(Cluster):
    """Has room for many streams, and for a few sequences more."""

    def __init__(self, num_streams: int, num_more: int, **options: Any) -> None:
        num_seqs = num_streams + num_more
        super().__init__(
            num_blocks=90 * num_seqs, max_num_seqs=num_seqs, max_num_batched_tokens=BUDGET, max_model_len=800, **options
        )
        self.scheduler = Scheduler(self.limits)
        self.scheduler.begin(new_attachment(self.cache))
        self.sequences = [self.add(seq_id, 3, 60) for seq_id in range(1, num_streams + 1)]
        while not all(each.output_token_ids for each in self.sequences):
            self.step()

    def add(self, seq_id: int, prompt_len: int, max_tokens: int, client: int = 0) -> Sequence:
        sequence = make_sequence(seq_id, prompt_len, max_tokens)
        ask(sequence, client=client)
        self.scheduler.add(sequence)
        return sequence

    def add_prompts(self, lengths: list[int], max_tokens: int = 2, num_clients: int = 1) -> None:
        for number, length in enumerate(lengths):
            seq_id = 1000 + len(self.sequences)
            self.sequences.append(self.add(seq_id, length, max_tokens, number % num_clients))

    def next_with_prompts(self) -> StepPlan:
        for _ in range(5):
            num_before = len(self.plans)
            self.step()
            if len(self.plans) > num_before and num_prompt_tokens(self.plans[-1]):
                return self.plans[-1]
        raise AssertionError("no step has prompts")

    def run_all(self) -> None:
        self.run_until_idle()
        assert all(each.output_token_ids == expected_output(each) for each in self.sequences)


def test_prompts_fill_tiles_while_others_wait() -> None:
    cluster = LargeCluster(150, 10)
    cluster.add_prompts([60] * 10 + [50] * 10)  # the second ten have no place yet
    plan = cluster.next_with_prompts()
    assert plan.num_tokens == 512, "750 rows would need six tiles, of which one would not be full"
    assert cluster.next_with_prompts().num_tokens == 384, "what was left comes in the next step, beside 156 streams"
    cluster.run_all()


def test_nothing_is_left_for_later_if_nobody_waits() -> None:
    cluster = LargeCluster(150, 10)
    cluster.add_prompts([60] * 10)
    assert cluster.next_with_prompts().num_tokens == 750
    cluster.run_all()


def test_few_streams_wait_for_no_tile() -> None:
    cluster = LargeCluster(20, 10)
    cluster.add_prompts([60] * 10 + [50] * 10)
    assert cluster.next_with_prompts().num_tokens == 620
    cluster.run_all()


@pytest.mark.parametrize(
    ("length", "num_rows"), [(100, 250), (107, 256), (212, 256), (213, 363), (300, 384), (490, 512), (650, 512)]
)
def test_at_least_a_half_of_the_prompts_tokens_is_computed(length: int, num_rows: int) -> None:
    cluster = LargeCluster(150, 1)
    cluster.add_prompts([length, 50])
    assert cluster.next_with_prompts().num_tokens == num_rows
    cluster.run_all()


def test_a_machine_that_measures_its_steps_has_no_tiles() -> None:
    cluster = TimedCluster(lambda plan: 0.001, max_num_seqs=131)
    cluster.run_streams(130)
    for seq_id in (500, 501):
        cluster.add(seq_id, 200, 2)
    num_before = len(cluster.plans)
    cluster.run_until_idle()
    with_prompts = [plan.num_tokens for plan in cluster.plans[num_before:] if num_prompt_tokens(plan)]
    assert with_prompts[0] == 330


@settings(max_examples=examples(15), deadline=None)
@given(
    st.integers(TILE_ROWS - 3, TILE_ROWS + 20),
    st.integers(1, 6),
    st.lists(st.integers(1, 300), min_size=1, max_size=12),
    st.integers(1, 3),
)
def test_every_sequence_gets_its_tokens(
    num_streams: int, num_places: int, lengths: list[int], num_clients: int
) -> None:
    cluster = LargeCluster(num_streams, num_places)
    cluster.add_prompts(lengths, 3, num_clients)
    cluster.run_all()
