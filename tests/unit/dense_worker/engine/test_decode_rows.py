"""Sequences in rows get the same steps as sequences that are planned and updated one by one."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.common.kv_cache.sliding_window import SlidingWindow
from services.dense_worker.engine.block_ledger import BlockLedger
from services.dense_worker.engine.decode_rows import DecodeRows
from services.dense_worker.engine.limits import Policy
from services.dense_worker.engine.sequence import Sequence
from services.step import StepPlan
from tests.support.dense.scheduler_cluster import STOP_TOKEN, expected_output, make_sequence, new_attachment
from tests.support.dense.sequences import ask
from tests.support.examples import examples
from tests.unit.dense_worker.engine.fairness.test_fair_scheduler import SharedCluster

requests = st.lists(
    st.tuples(
        st.integers(1, 30),  # prompt
        st.integers(1, 30),  # max_tokens
        st.booleans(),  # can stop
        st.integers(0, 2),  # client
        st.integers(0, 3),  # steps before the next one
        st.one_of(st.none(), st.integers(0, 20)),  # the step in which it is cancelled
    ),
    min_size=1,
    max_size=12,
)

# While two prompts of other clients share steps with two streams, the last token of one stream is under way.
ONE_ENDS = [
    (1, 3, False, 0, 0, None),
    (1, 12, False, 2, 1, None),
    (12, 1, False, 0, 0, None),
    (12, 1, False, 1, 0, None),
]
# A row finds no block, and the last prompt gives up its own: the prompt before it gets the row's token.
ONE_GIVES_WAY = [
    (1, 30, False, 0, 0, None),
    (1, 30, False, 0, 0, None),
    (30, 2, False, 0, 0, None),
    (20, 2, False, 0, 0, None),
]
# No row needs a block, but a sequence that has no row yet does, and gets that of the last row.
ONE_WITHOUT_ROW_GROWS = [
    (30, 10, False, 0, 0, None),
    (18, 10, False, 0, 0, None),
    (8, 10, False, 0, 0, None),
    (1, 10, False, 0, 0, None),
]


class RecordedCluster(SharedCluster):
    """A cluster of sequences in rows, or of the same ones without: then they report log-probabilities."""

    def __init__(self, *arguments: object, has_rows: bool) -> None:
        super().__init__(*arguments)
        self.has_rows = has_rows
        self.cancels: dict[int, list[int]] = {}  # seq_ids by step
        self.steps: list[tuple[object, ...]] = []

    def arrive_plain(self, prompt_len: int, max_tokens: int, can_stop: bool, client: int) -> Sequence:
        self.num_sequences += 1
        sequence = make_sequence(self.num_sequences, prompt_len, max_tokens, can_stop=can_stop)
        sequence.arrival_s = float(self.num_sequences)
        ask(sequence, client=client, num_logprobs=None if self.has_rows else 0)
        self.scheduler.add(sequence)
        return sequence

    def step(self, *, answer_opens: bool = True) -> None:
        for seq_id in self.cancels.pop(len(self.steps), ()):
            self.scheduler.cancel(seq_id)
        num_outputs, num_plans = len(self.outputs), len(self.plans)
        super().step(answer_opens=answer_opens)
        outputs = Counter((each.sequence.seq_id, *each.token_ids) for each in self.outputs[num_outputs:])
        self.steps.append((list(map(describe, self.plans[num_plans:])), outputs, self.scheduler.num_preemptions))


def describe(plan: StepPlan) -> tuple[object, ...]:
    """What a plan does; rows come first in it, others in the order of the queue."""
    return frozenset(plan.entries), Counter(plan.close_seq_ids), Counter(plan.sampled)


@settings(max_examples=examples(150), deadline=None)
@given(
    requests,
    st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
    st.integers(16, 40),
    st.integers(1, 6),
    st.integers(6, 40),
    st.one_of(st.none(), st.integers(1, 20)),
)
@example(ONE_ENDS, "guaranteed_no_evict", 16, 5, 6, None)
@example(ONE_GIVES_WAY, "max_utilization", 16, 6, 6, None)
@example(ONE_WITHOUT_ROW_GROWS, "max_utilization", 16, 6, 40, None)
def test_rows_get_the_steps_of_single_sequences(
    arrivals: list[tuple[int, int, bool, int, int, int | None]],
    policy: Policy,
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    attaches_again_in: int | None,
) -> None:
    clusters = [RecordedCluster(policy, num_blocks, max_num_seqs, budget, has_rows=each) for each in (True, False)]
    for cluster in clusters:
        for *options, gap, cancelled_in in arrivals:
            sequence = cluster.arrive_plain(*options)
            if cancelled_in is not None:
                cluster.cancels.setdefault(len(cluster.steps) + cancelled_in, []).append(sequence.seq_id)
            cluster.run(gap)
            if len(cluster.steps) == attaches_again_in:
                cluster.in_flight = None
                cluster._opening.clear()
                cluster.scheduler.begin(new_attachment(cluster.cache))
                cluster.scheduler.close_orphans()
        cluster.run_until_idle()
    by_rows, one_by_one = clusters
    assert by_rows.steps == one_by_one.steps


def rows_of(sequences: list[Sequence]) -> DecodeRows:
    """Rows of sequences whose prompts are computed, and which hold no blocks."""
    rows = DecodeRows()
    for sequence in sequences:
        sequence.order = float(sequence.seq_id), 0
        sequence.num_computed_tokens = sequence.num_prompt_tokens
        sequence.output_token_ids = [0]
        rows.enter(sequence)
    return rows


def test_more_sequences_than_slots_keep_the_order_of_the_queue() -> None:
    seq_ids = [int(each) for each in np.random.default_rng(0).permutation(300)]
    sequences = {seq_id: make_sequence(seq_id, 3, 9) for seq_id in seq_ids}
    rows = rows_of(list(sequences.values()))
    for seq_id in seq_ids[::3]:
        rows.leave(sequences[seq_id])
    slots = rows.unfinished()
    decodes = rows.advance(slots, np.zeros(len(slots), bool))
    left = sorted(set(seq_ids) - set(seq_ids[::3]))
    assert decodes.rows.seq_ids.tolist() == left
    assert [each.seq_id for each in decodes.rows.sequences] == left
    assert [sequences[seq_id].num_computed_tokens for seq_id in left] == [4] * len(left)
    assert [sequences[seq_id].num_pending_tokens for seq_id in left] == [1] * len(left)


def test_a_row_that_has_left_or_gets_its_last_token_or_a_stop_token_may_end() -> None:
    sequences = [make_sequence(seq_id, 3, 9, can_stop=seq_id == 2) for seq_id in range(5)]
    ask(sequences[3], max_tokens=2)
    rows = rows_of(sequences)
    planned = rows.advance(rows.unfinished(), np.zeros(5, bool)).rows
    rows.leave(sequences[4])
    tokens = [5, STOP_TOKEN, STOP_TOKEN, 5, 5]
    assert rows.may_end(planned, np.array(tokens), tokens).tolist() == [False, True, True, True, True]
    rows.leave(sequences[2])  # it was the only one that a token ends
    assert rows.may_end(planned, np.array(tokens), tokens).tolist() == [False, False, True, True, True]


def test_a_slot_that_is_used_again_is_not_taken_for_its_last_sequence() -> None:
    first, second = make_sequence(1, 3, 9), make_sequence(2, 3, 9)
    rows = rows_of([first])
    planned = rows.advance(rows.unfinished(), np.zeros(1, bool)).rows
    slot = first.slot
    rows.leave(first)
    second.num_computed_tokens, second.output_token_ids = 3, [0]
    rows.enter(second)
    assert second.slot == slot
    assert rows.may_end(planned, np.array([5]), [5]).tolist() == [True]


def test_rows_take_the_blocks_that_are_reserved_for_them_first() -> None:
    ledger = BlockLedger(SlidingWindow(4), 10, 10)
    sequences = [make_sequence(seq_id, 3, 20) for seq_id in range(3)]
    sequences[1].num_reserved_blocks = 2
    ledger.reserve(2)
    rows = rows_of(sequences)
    slots = rows.unfinished()
    assert rows.num_unreserved(slots) == 2
    rows.grow([(0, slots)], {0: ledger})
    assert (ledger.num_free_blocks, ledger.num_reserved_blocks) == (7, 1)
    assert [(each.num_blocks, each.num_reserved_blocks) for each in sequences] == [(1, 0), (1, 1), (1, 0)]


def test_a_row_cannot_be_changed_through_its_sequence() -> None:
    sequence = make_sequence(1, 3, 9)
    rows_of([sequence])
    with pytest.raises(AttributeError):
        sequence.num_blocks = 3


def test_a_sequence_has_a_row_once_its_first_token_is_known() -> None:
    cluster = RecordedCluster("guaranteed_no_evict", 64, 4, 32, has_rows=True)
    sequence = cluster.arrive_plain(5, 20, False, 0)
    cluster.run(6)
    assert sequence.slot is not None
    cluster.run_until_idle()
    assert sequence.output_token_ids == expected_output(sequence)


def test_rows_stay_while_steps_are_planned_ahead_and_their_tokens_would_end_others() -> None:
    """Otherwise each step would handle all its sequences one by one, since it was planned before the last one ended."""
    cluster = RecordedCluster("guaranteed_no_evict", 64, 8, 32, has_rows=True)
    sequences = [cluster.arrive_plain(5, 40, False, 0) for _ in range(4)]
    others = {token_id for each in sequences[:3] for token_id in expected_output(each)}
    ask(sequences[3], stop_token_ids=tuple(sorted(others - set(expected_output(sequences[3])))))
    cluster.run(6)
    version = cluster.scheduler.session.rows.version
    lengths = [len(each.output_token_ids) for each in sequences]
    cluster.run(20)
    assert [len(each.output_token_ids) for each in sequences] == [length + 20 for length in lengths]
    assert cluster.scheduler.session.rows.version == version, "nobody came or went"
    cluster.run_until_idle()
    assert [each.output_token_ids for each in sequences] == [expected_output(each) for each in sequences]
