"""The order of the queue, the limit on overtaking, timeouts, and how many sequences may wait."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.config import load_config
from services.common.errors import CapacityError, QueueTimeout
from services.dense_worker.engine.limits import Policy
from services.dense_worker.engine.sequence import FinishReason, Sequence, SequenceStatus
from services.dense_worker.engine.waiting_queue import CHECK_INTERVAL_S, WaitingQueue
from services.dense_worker.service import scheduler_limits
from tests.support.dense.scheduler_cluster import Cluster, expected_output, make_sequence
from tests.support.dense.sequences import ask
from tests.support.examples import examples

PROTO = Path(__file__).parents[4] / "protos" / "gateway.proto"


def arriving(
    seq_id: int,
    arrival_s: float = 0.0,
    priority: int = 0,
    *,
    num_tokens: int = 3,
    max_tokens: int = 4,
    timeout_s: float | None = None,
) -> Sequence:
    sequence = make_sequence(seq_id, num_tokens, max_tokens)
    sequence.arrival_s, sequence.queue_timeout_s = arrival_s, timeout_s
    ask(sequence, priority=priority)
    return sequence


def drain(queue: WaitingQueue) -> list[int]:
    seq_ids = []
    while queue:
        queue.remove(first := next(queue.heads(())))
        seq_ids.append(first.seq_id)
    return seq_ids


arrivals = st.lists(st.tuples(st.floats(0, 300), st.integers(-100, 100)), min_size=1, max_size=30)


@given(arrivals, st.floats(0, 10))
def test_the_order_follows_arrival_and_priority(
    times: list[tuple[float, int]], ageing_s: float
) -> None:
    queue = WaitingQueue(100, 10_000, ageing_s)
    for seq_id, (arrival_s, priority) in enumerate(times):
        queue.admit(sequence := arriving(seq_id, arrival_s, priority))
        queue.push(sequence)
    expected = sorted(range(len(times)), key=lambda i: times[i][0] + times[i][1] * ageing_s)  # stable
    assert drain(queue) == expected


@given(arrivals, st.floats(0, 10), st.floats(0, 1))
def test_overtaking_ends_at_the_stated_bound(
    times: list[tuple[float, int]], ageing_s: float, head_start_s: float
) -> None:
    times.sort()
    queue = WaitingQueue(100, 10_000, ageing_s, head_start_s)
    for seq_id, (arrival_s, priority) in enumerate(times):
        queue.admit(sequence := arriving(seq_id, arrival_s, priority, max_tokens=1 + seq_id % 8))
        queue.push(sequence)
    served = drain(queue)
    for position, seq_id in enumerate(served):
        arrival_s, priority = times[seq_id]
        latest = arrival_s + (priority + 100) * ageing_s + 7 * head_start_s
        assert all(times[earlier][0] <= latest * (1 + 1e-9) for earlier in served[:position])


@pytest.mark.parametrize(
    ("head_start_s", "expected"), [(0.0, [1, 2, 3, 4]), (0.1, [1, 4, 2, 3]), (1.0, [4, 2, 1, 3])]
)
def test_a_request_for_more_tokens_goes_ahead_of_those_that_came_shortly_before(
    head_start_s: float, expected: list[int]
) -> None:
    queue = WaitingQueue(100, 10_000, 1.0, head_start_s)
    for seq_id, (arrival_s, max_tokens) in enumerate([(0.0, 8), (1.5, 10), (2.0, 8), (2.5, 24)], start=1):
        queue.admit(sequence := arriving(seq_id, arrival_s, max_tokens=max_tokens))
        queue.push(sequence)
    assert drain(queue) == expected


def test_a_sequence_that_has_had_turns_keeps_its_head_start() -> None:
    queue = WaitingQueue(100, 10_000, 1.0, head_start_s=0.1)
    long, short = arriving(1, 5.0, max_tokens=24), arriving(2, 3.5, max_tokens=4)
    for each in (long, short):
        queue.admit(each)
    assert queue.order_after_turn(long) == long.order < short.order == queue.order_after_turn(short)
    long.output_token_ids.append(9)
    assert queue.order_after_turn(long) > long.order


def test_the_queue_has_the_head_start_of_the_config() -> None:
    config = load_config(None, ["scheduler.head_start_s=0.25"])
    assert scheduler_limits(config, max_model_len=64).head_start_s == 0.25


@pytest.mark.parametrize(("head_start_s", "num_steps"), [(0.0, 30), (0.05, 20)])
def test_a_batch_whose_longest_request_begins_first_takes_fewer_steps(head_start_s: float, num_steps: int) -> None:
    cluster = Cluster(num_blocks=64, max_num_seqs=2, max_num_batched_tokens=16, head_start_s=head_start_s)
    sequences = [make_sequence(seq_id, 3, max_tokens) for seq_id, max_tokens in ((1, 10), (2, 10), (3, 20))]
    for each in sequences:
        cluster.scheduler.add(each)
    cluster.run_until_idle()
    assert all(each.output_token_ids == expected_output(each) for each in sequences)
    assert len([plan for plan in cluster.plans if len(plan.entries)]) in range(num_steps, num_steps + 3)


def test_the_range_of_priorities_is_documented() -> None:
    assert "In [-100, 100]." in " ".join(PROTO.read_text().split("int32 priority")[0].splitlines()[-3:])


def test_an_unimportant_sequence_runs_although_important_ones_keep_arriving() -> None:
    """One sequence runs at a time, for one second, and an urgent one arrives every second.

    Without ageing the unimportant sequence would wait for ever.
    """
    cluster = Cluster(max_num_seqs=1, priority_ageing_s=1.0)
    patient = arriving(1, 0.0, 20)
    cluster.scheduler.add(patient)
    num_served = 0
    for second in range(200):
        cluster.scheduler.add(arriving(100 + second, float(second), -10, max_tokens=1))
        before = len(cluster.outputs)
        while len(cluster.outputs) == before:
            cluster.step()
        if patient.status is not SequenceStatus.WAITING:
            break
        num_served += 1
    assert num_served == pytest.approx(30, abs=2)  # the unimportant sequence is overtaken for 20 - (-10) seconds


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 16), st.integers(-3, 3), st.integers(0, 3)),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
    st.integers(12, 24),
    st.integers(1, 5),
    st.sets(st.integers(1, 40), max_size=4),
)
def test_with_priorities_and_new_attachments_every_sequence_gets_its_tokens(
    requests: list[tuple[int, int, int, int]],
    policy: Policy,
    num_blocks: int,
    max_num_seqs: int,
    resets: set[int],
) -> None:
    cluster = Cluster(policy, num_blocks, max_num_seqs, 12, priority_ageing_s=4.0)
    sequences: list[Sequence] = []
    num_steps = 0

    def step() -> None:
        nonlocal num_steps
        num_steps += 1
        live = [each for each in sequences if each.status is not SequenceStatus.FINISHED]
        first = min(live, key=lambda each: each.order) if live else None
        was_running = first is not None and first.status is SequenceStatus.RUNNING
        if num_steps in resets:
            cluster.attach_again()
        else:
            cluster.step()
            if was_running:
                assert first.status is not SequenceStatus.WAITING, "the first sequence in order was preempted"
        running = [each.order for each in cluster.scheduler.session.running]
        assert running == sorted(running)

    for seq_id, (prompt_len, max_tokens, priority, gap) in enumerate(requests, start=1):
        sequence = make_sequence(seq_id, prompt_len, max_tokens)
        sequence.arrival_s = float(num_steps)
        ask(sequence, priority=priority)
        cluster.scheduler.add(sequence)
        sequences.append(sequence)
        for _ in range(gap):
            step()
    for _ in range(45):
        step()
    cluster.run_until_idle(max_steps=1000)
    for sequence in sequences:
        assert sequence.output_token_ids == expected_output(sequence)


def test_kept_blocks_are_used_before_more_important_sequences_need_them() -> None:
    """After a new attachment an important sequence must not wait for blocks of a sequence that is later in order."""
    cluster = Cluster(num_blocks=8)
    holder = arriving(1, 0.0, 50, num_tokens=20, max_tokens=12)
    cluster.scheduler.add(holder)
    for _ in range(4):
        cluster.step()
    important = arriving(2, 0.0, -50, num_tokens=20, max_tokens=12)
    cluster.scheduler.add(important)
    cluster.attach_again()
    cluster.step()
    assert [entry.seq_id for entry in cluster.plans[-1].entries] == [holder.seq_id]
    assert cluster.plans[-1].num_tokens <= 2, "nothing is prefilled again"
    cluster.run_until_idle()
    assert holder.output_token_ids == expected_output(holder)
    assert important.output_token_ids == expected_output(important)


@pytest.mark.parametrize("num_steps", range(4, 40))
def test_sequences_that_filled_the_cache_continue_after_a_new_attachment(num_steps: int) -> None:
    """All blocks are held and none is free, so the first sequence can grow only if the last one releases its blocks."""
    cluster = Cluster("max_utilization", num_blocks=8)
    sequences = [arriving(seq_id, num_tokens=4, max_tokens=26) for seq_id in (1, 2)]
    for sequence in sequences:
        cluster.scheduler.add(sequence)
    for _ in range(num_steps):
        cluster.step()
    cluster.attach_again()
    cluster.run_until_idle(max_steps=500)
    for sequence in sequences:
        assert sequence.output_token_ids == expected_output(sequence)


def test_blocks_kept_by_a_sequence_that_is_cancelled_while_it_waits_are_closed() -> None:
    cluster = Cluster()
    cluster.scheduler.add(sequence := arriving(1, num_tokens=20))
    for _ in range(3):
        cluster.step()
    cluster.attach_again()
    cluster.scheduler.cancel(sequence.seq_id)
    cluster.run_until_idle()


def test_a_sequence_that_waits_too_long_fails_with_its_time_and_the_limit() -> None:
    cluster = Cluster(max_num_seqs=1)
    cluster.scheduler.add(arriving(1, 10.0, max_tokens=30))
    cluster.step()
    cluster.scheduler.add(arriving(2, 10.0, timeout_s=1.5))
    cluster.scheduler.add(arriving(3, 11.0, timeout_s=1.5))
    cluster.scheduler.add(arriving(4, 0.0))
    assert cluster.scheduler.expire(11.4) == []
    [output] = cluster.scheduler.expire(11.4 + CHECK_INTERVAL_S)
    assert output.sequence.seq_id == 2 and output.finish_reason is FinishReason.ERROR
    assert isinstance(output.error, QueueTimeout)
    assert str(output.error) == "waited 1.650 s for the first step, the limit is 1.5 s"
    assert cluster.scheduler.num_waiting == 2
    [output] = cluster.scheduler.expire(99.0)
    assert output.sequence.seq_id == 3
    cluster.run_until_idle()


def test_a_sequence_that_has_run_once_never_expires() -> None:
    cluster = Cluster("max_utilization", num_blocks=8)
    for seq_id in (1, 2):
        cluster.scheduler.add(arriving(seq_id, timeout_s=5.0, num_tokens=4, max_tokens=24))
    while not cluster.scheduler.num_preemptions:
        cluster.step()
    assert cluster.scheduler.num_waiting == 1
    assert cluster.scheduler.expire(1000.0) == []
    resubmitted = arriving(3, timeout_s=5.0)
    resubmitted.output_token_ids = [1]  # computed by an earlier dense worker
    cluster.scheduler.add(resubmitted)
    assert cluster.scheduler.expire(2000.0) == []


def test_a_queue_full_of_tokens_refuses_with_their_number() -> None:
    cluster = Cluster(max_num_waiting_tokens=50)
    cluster.scheduler.add(arriving(1, num_tokens=60, max_tokens=4))  # a single prompt may be longer than the limit
    cluster.scheduler.cancel(1)
    cluster.scheduler.add(arriving(2, num_tokens=30))
    cluster.scheduler.add(arriving(3, num_tokens=20))
    with pytest.raises(CapacityError, match="prompt of 1 tokens 51 would be waiting, the limit is 50"):
        cluster.scheduler.add(arriving(4, num_tokens=1))
    cluster.step()  # now both run
    cluster.scheduler.add(arriving(5, num_tokens=40))
    cluster.run_until_idle()


def test_a_full_queue_accepts_resubmitted_sequences() -> None:
    cluster = Cluster(max_num_waiting=1)
    cluster.scheduler.add(arriving(1))
    resubmitted = arriving(2)
    resubmitted.output_token_ids = expected_output(resubmitted)[:1]
    cluster.scheduler.add(resubmitted)
    with pytest.raises(CapacityError, match="1 sequences are waiting, the limit is 1"):
        cluster.scheduler.add(arriving(3))
    cluster.run_until_idle()


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.sampled_from(["add", "step", "cancel", "reset", "expire"]), max_size=60))
def test_the_limits_count_only_sequences_that_never_ran(actions: list[str]) -> None:
    cluster = Cluster("max_utilization", num_blocks=12, max_num_seqs=2)
    sequences: list[Sequence] = []
    for number, action in enumerate(actions, start=1):
        if action == "add":
            timeout_s = 3.0 if number % 3 == 0 else None
            sequences.append(arriving(number, float(number), number % 5, max_tokens=12, timeout_s=timeout_s))
            cluster.scheduler.add(sequences[-1])
        elif action == "step":
            cluster.step()
        elif action == "cancel" and sequences:
            cluster.scheduler.cancel(sequences[number % len(sequences)].seq_id)
        elif action == "reset":
            cluster.attach_again()
        else:
            cluster.scheduler.expire(float(number))
        new = [each for each in sequences if each.status is SequenceStatus.WAITING and not each.has_started]
        queue = cluster.scheduler._waiting
        assert (queue._num_new, queue._num_new_tokens) == (len(new), sum(each.num_prompt_tokens for each in new))
    cluster.run_until_idle()
