"""Sequences far beyond the window of their model: bounded blocks, honest books, and the same tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import CapacityError
from services.dense_worker.engine.limits import Policy
from services.dense_worker.engine.sequence import Sequence, SequenceStatus
from tests.support.dense.scheduler_cluster import BLOCK_SIZE, Cluster, expected_output, make_sequence
from tests.support.examples import examples

WINDOW = 9
BUDGET = 8
# Between a step and the next: the window before the first of 2 * BUDGET tokens, which may begin inside a block, and
# one block more.
MOST_BLOCKS = (WINDOW - 1 + 2 * BUDGET + BLOCK_SIZE - 2) // BLOCK_SIZE + 2


def make_cluster(num_blocks: int, policy: Policy = "guaranteed_no_evict", **limits: int) -> Cluster:
    return Cluster(
        policy, num_blocks, max_num_batched_tokens=BUDGET, max_model_len=2000, window=WINDOW, **limits
    )


def most_held_blocks(cluster: Cluster) -> int:
    """Runs until all sequences have ended; returns the most blocks that one held after a step."""
    most = 0
    while cluster.in_flight is not None or cluster.scheduler.num_running or cluster.scheduler.num_waiting:
        cluster.step()
        most = max([most, *cluster.cache.orphaned_blocks.values()])
    cluster.run_until_idle()
    return most


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(3, 500), (500, 40), (300, 300)])
def test_a_sequence_of_any_length_runs_in_the_blocks_of_its_window(prompt_len: int, max_tokens: int) -> None:
    cluster = make_cluster(num_blocks=MOST_BLOCKS)
    sequence = make_sequence(1, prompt_len, max_tokens)
    cluster.scheduler.add(sequence)
    assert most_held_blocks(cluster) <= MOST_BLOCKS < (prompt_len + max_tokens) // BLOCK_SIZE
    assert sequence.output_token_ids == expected_output(sequence)
    assert cluster.scheduler.num_preemptions == 0


def test_without_a_prompt_left_a_sequence_holds_its_window_and_two_blocks_more() -> None:
    cluster = make_cluster(num_blocks=100)
    cluster.scheduler.add(make_sequence(1, 2, 400))
    assert most_held_blocks(cluster) <= -(-WINDOW // BLOCK_SIZE) + 2


def test_blocks_of_sinks_are_kept_and_counted() -> None:
    cluster = make_cluster(num_blocks=MOST_BLOCKS + 2, num_sink_tokens=BLOCK_SIZE + 1)
    sequence = make_sequence(1, 300, 300)
    cluster.scheduler.add(sequence)
    assert most_held_blocks(cluster) <= MOST_BLOCKS + 2
    assert sequence.output_token_ids == expected_output(sequence)
    with pytest.raises(CapacityError, match=f"need {MOST_BLOCKS + 2} KV cache blocks"):
        make_cluster(num_blocks=MOST_BLOCKS + 1, num_sink_tokens=BLOCK_SIZE + 1).scheduler.add(make_sequence(2, 9, 300))


def test_one_block_less_than_a_sequence_may_need_is_an_error_that_names_both() -> None:
    cluster = make_cluster(num_blocks=MOST_BLOCKS - 1)
    with pytest.raises(CapacityError, match=f"need {MOST_BLOCKS} KV cache blocks, the cache has {MOST_BLOCKS - 1}"):
        cluster.scheduler.add(make_sequence(1, 300, 300))


def test_as_many_long_sequences_run_together_as_have_room_for_their_windows() -> None:
    cluster = make_cluster(num_blocks=4 * MOST_BLOCKS)
    sequences = [make_sequence(seq_id, 200, 200) for seq_id in range(1, 7)]
    for sequence in sequences:
        cluster.scheduler.add(sequence)
    cluster.step()
    assert cluster.scheduler.num_running == 4
    cluster.run_until_idle()
    assert all(each.output_token_ids == expected_output(each) for each in sequences)
    assert cluster.scheduler.num_preemptions == 0


def test_a_reservation_shrinks_when_only_single_tokens_are_left_to_compute() -> None:
    cluster = make_cluster(num_blocks=MOST_BLOCKS + 4)
    cluster.scheduler.add(make_sequence(1, 200, 300))
    while len(cluster.plans) < 40:
        cluster.step()
    cluster.scheduler.add(make_sequence(2, 3, 5))  # had no room beside the prompt and its reservation
    cluster.step()
    cluster.step()
    assert cluster.scheduler.num_running == 2
    cluster.run_until_idle()


def test_a_step_that_drops_nothing_wants_no_answer() -> None:
    cluster = make_cluster(num_blocks=100)
    cluster.scheduler.add(make_sequence(1, 2, 100))
    cluster.run_until_idle()
    dropping = [plan for plan in cluster.plans if plan.evicts_blocks]
    assert len(dropping) == pytest.approx(100 / BLOCK_SIZE, abs=4)


class Restarts:
    """Steps with lost plans in between: the dense worker died, and the gateway submits its sequences again."""

    def __init__(self, cluster: Cluster, at: set[int]) -> None:
        self.cluster = cluster
        self.at = at
        self.num_steps = 0

    def run(self) -> None:
        for _ in range(3000):
            self.cluster.step()
            self.num_steps += 1
            if self.num_steps in self.at:
                self.cluster.attach_again()
            if self.num_steps > max(self.at, default=0) and not self.cluster.scheduler.num_running:
                break
        self.cluster.run_until_idle()


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 120), st.integers(1, 80)), min_size=1, max_size=6),
    st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
    st.integers(MOST_BLOCKS + 2, 3 * MOST_BLOCKS),
    st.integers(1, 4),
    st.sets(st.integers(1, 90), max_size=4),
    st.sampled_from([0, 1, BLOCK_SIZE + 1]),
)
def test_long_sequences_with_common_prefixes_share_preempt_and_continue(
    lengths: list[tuple[int, int]],
    policy: Policy,
    num_blocks: int,
    max_num_seqs: int,
    restarts: set[int],
    num_sink_tokens: int,
) -> None:
    limits = {"max_num_seqs": max_num_seqs, "num_sink_tokens": num_sink_tokens}
    cluster = make_cluster(num_blocks, policy, **limits)
    sequences: list[Sequence] = []
    for seq_id, (prompt_len, max_tokens) in enumerate(lengths, start=1):
        sequences.append(make_sequence(seq_id, prompt_len, max_tokens))  # prompts begin with the same tokens
        cluster.scheduler.add(sequences[-1])
    Restarts(cluster, restarts).run()
    for sequence in sequences:
        assert sequence.status is SequenceStatus.FINISHED
        assert sequence.output_token_ids == expected_output(sequence)
