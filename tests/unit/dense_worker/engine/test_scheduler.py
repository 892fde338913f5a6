"""What the scheduler does with any requests, and with some in particular."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import CapacityError, InvalidRequest
from services.dense_worker.engine.limits import Policy
from services.dense_worker.engine.sequence import FinishReason, Sequence
from services.dense_worker.engine.step_planner import MAX_HOST_S
from services.dense_worker.features.sequence_feature import SequenceFeature
from services.step import PlanAccepted, RaggedTokens, StepResult
from tests.support.attention.open_now import open_sequence
from tests.support.dense.scheduler_cluster import (
    STOP_TOKEN,
    WINDOWS,
    Cluster,
    check_outputs,
    expected_output,
    make_sequence,
    new_attachment,
    next_token,
    requests,
    run_arrivals,
)
from tests.support.examples import examples
from tests.support.plans import make_plan


@settings(max_examples=examples(150), deadline=None)
@given(
    requests,
    st.sampled_from(["guaranteed_no_evict", "max_utilization", "take_turns"]),
    st.integers(16, 40),
    st.integers(1, 6),
    st.integers(6, 40),
    st.integers(1, 3),
    WINDOWS,
)
def test_every_sequence_gets_its_tokens_and_every_block_is_freed(
    arrivals: list[tuple[int, int, bool, int, int | None]],
    policy: Policy,
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    answer_every: int,
    kept: dict[str, int],
) -> None:
    cluster = Cluster(policy, num_blocks, max_num_seqs, budget, **kept)
    sequences, cancelled = run_arrivals(cluster, arrivals, answer_every)
    check_outputs(sequences, cancelled)
    ended = [output.sequence.seq_id for output in cluster.outputs if output.finish_reason is not None]
    assert len(ended) == len(set(ended)), "a sequence ends once"
    delivered: dict[int, list[int]] = {}
    for output in cluster.outputs:
        assert output.token_ids
        delivered.setdefault(output.sequence.seq_id, []).extend(output.token_ids)
    for sequence in sequences:
        if sequence.seq_id not in cancelled:
            assert delivered[sequence.seq_id] == expected_output(sequence)


def test_a_long_prompt_does_not_delay_running_streams() -> None:
    cluster = Cluster(num_blocks=64, max_num_batched_tokens=8)
    cluster.scheduler.add(make_sequence(1, 2, 40))
    for _ in range(4):
        cluster.step()
    before = len(cluster.plans)
    cluster.scheduler.add(make_sequence(2, 40, 4))
    for _ in range(12):
        cluster.step()
    for plan in cluster.plans[before:]:
        assert 1 in [entry.seq_id for entry in plan.entries], "a decode was left out of a step"
    chunks = [entry.num_tokens for plan in cluster.plans for entry in plan.entries if entry.seq_id == 2]
    assert max(chunks) == 7 and sum(chunks[:6]) == 40, "the prompt gets the rest of the budget"


def test_a_late_short_request_ends_before_an_early_long_one() -> None:
    cluster = Cluster()
    cluster.scheduler.add(make_sequence(1, 4, 40))
    for _ in range(5):
        cluster.step()
    cluster.scheduler.add(make_sequence(2, 4, 3))
    cluster.run_until_idle()
    ends = [output.sequence.seq_id for output in cluster.outputs if output.finish_reason is not None]
    assert ends == [2, 1]


def test_sequences_are_opened_in_arrival_order_even_if_a_later_one_would_fit() -> None:
    cluster = Cluster(num_blocks=16, max_num_seqs=4)
    cluster.scheduler.add(make_sequence(1, 20, 20))  # 10 blocks
    cluster.scheduler.add(make_sequence(2, 30, 10))  # 10 blocks, so it must wait
    cluster.scheduler.add(make_sequence(3, 2, 2))  # this one would fit
    assert [sequence.seq_id for sequence in cluster.scheduler.next_to_open()] == [1]


def test_guaranteed_policy_never_preempts_and_utilization_policy_does() -> None:
    for policy, expects_preemption in (("guaranteed_no_evict", False), ("max_utilization", True)):
        cluster = Cluster(policy, num_blocks=16, max_num_seqs=6)
        for seq_id in range(1, 7):
            cluster.scheduler.add(make_sequence(seq_id, 5 + seq_id, 30))
        cluster.run_until_idle()
        assert bool(cluster.scheduler.num_preemptions) is expects_preemption


def test_a_plan_is_published_before_the_previous_step_ends() -> None:
    cluster, sequence = Cluster(), make_sequence(1, 3, 10)
    cluster.scheduler.add(sequence)
    cluster.step()
    cluster.step()  # the second plan exists although the first step's token is not known
    assert [plan.entries[0].position for plan in cluster.plans] == [0, 3]
    assert sequence.num_computed_tokens == 4


def test_a_stopped_sequence_wastes_at_most_one_token() -> None:
    cluster = Cluster()
    seq_id = next(i for i in range(1, 50) if STOP_TOKEN in [next_token(i, 3 + n) for n in range(10)])
    sequence = make_sequence(seq_id, 3, 30, can_stop=True)
    cluster.scheduler.add(sequence)
    cluster.run_until_idle()
    num_sampled = sum(entry.num_logits for plan in cluster.plans for entry in plan.entries)
    assert sequence.output_token_ids[-1] == STOP_TOKEN
    assert num_sampled <= len(sequence.output_token_ids) + 1


def test_cancelled_request_frees_its_blocks_within_one_step() -> None:
    cluster = Cluster()
    cluster.scheduler.add(make_sequence(1, 20, 40))
    for _ in range(6):
        cluster.step()
    cluster.scheduler.cancel(1)
    cluster.step()  # publishes the close, completes the step in flight
    cluster.step()
    assert cluster.cache.num_used_blocks == 0


def test_after_a_new_attachment_a_sequence_continues_with_its_blocks() -> None:
    cluster = Cluster()
    sequence = make_sequence(1, 10, 20)
    cluster.scheduler.add(sequence)
    for _ in range(6):
        cluster.step()
    num_computed = sequence.num_computed_tokens
    cluster.attach_again()
    cluster.step()
    first = cluster.plans[-1].entries[0]
    assert first.num_tokens <= 2 and first.position >= num_computed - 2, "nothing is prefilled again"
    cluster.run_until_idle()
    assert sequence.output_token_ids == expected_output(sequence)


def test_blocks_with_other_tokens_are_released_and_their_prefix_is_found_again() -> None:
    cluster = Cluster(num_blocks=8)
    sequence = make_sequence(1, 16, 8)
    open_sequence(cluster.cache, 1, [*sequence.spec.prompt_token_ids, 9, 9, 9, 9], 16)
    cluster.cache.plan_step(make_plan([(1, 20, 0)]))
    cluster.cache.commit_step()
    sequence.output_token_ids = expected_output(sequence)[:2]
    cluster.scheduler.begin(new_attachment(cluster.cache))
    cluster.scheduler.add(sequence)
    cluster.run_until_idle()
    assert sequence.output_token_ids == expected_output(sequence)


def test_a_flush_reaches_no_blocks_of_one_that_only_an_absent_attention_worker_has_seen() -> None:
    generations = []
    for scheduler in (Cluster().scheduler, Cluster().scheduler):  # which know nothing of each other
        scheduler.forget_prefixes()
        scheduler.add(make_sequence(1, 9, 2))
        scheduler.next_to_open()
        [new] = scheduler.session.to_open
        generations.append(new.prefix_generation)
    assert 0 < generations[0] < generations[1]


def test_unclaimed_sequences_of_a_dead_worker_are_closed() -> None:
    cluster = Cluster()
    open_sequence(cluster.cache, 99, [1, 2, 3, 4, 5], 5)
    cluster.cache.plan_step(make_plan([(99, 5, 0)]))
    cluster.cache.commit_step()
    cluster.scheduler.begin(new_attachment(cluster.cache))
    cluster.scheduler.close_orphans()
    cluster.run_until_idle()


def test_if_the_attention_worker_cannot_run_a_sequence_only_that_one_fails() -> None:
    cluster = Cluster()
    first, second = make_sequence(1, 4, 8), make_sequence(2, 4, 8)
    cluster.scheduler.add(first)
    cluster.scheduler.add(second)
    cluster.step()
    published = cluster.in_flight
    assert published is not None
    outputs = cluster.scheduler.accepted(PlanAccepted(published.plan.step_id, errors={1: "no room"}))
    outputs += cluster.scheduler.update(published, StepResult(RaggedTokens.from_rows([[3], [4]])))
    ended = [(output.sequence.seq_id, output.finish_reason) for output in outputs]
    assert ended == [(1, FinishReason.ERROR), (2, None)]


def test_blocks_of_a_refused_step_are_free_again() -> None:
    cluster = Cluster()
    cluster.scheduler.add(make_sequence(1, 8, 4))
    cluster.step()
    published, cluster.in_flight = cluster.in_flight, None
    assert published is not None
    cluster.scheduler.accepted(PlanAccepted(published.plan.step_id, errors={1: "no room"}))
    cluster.scheduler.update(published, StepResult(RaggedTokens.from_rows([[3]])))
    cluster.run_until_idle()


@pytest.mark.parametrize(
    ("sequence", "error", "words"),
    [
        (make_sequence(1, 60, 10), InvalidRequest, "max_model_len is 64"),
        (make_sequence(1, 30, 20), CapacityError, "13 KV cache blocks, the cache has 8"),
    ],
)
def test_a_sequence_that_can_never_run_is_refused_with_value_and_limit(
    sequence: Sequence, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Cluster(num_blocks=8).scheduler.add(sequence)


def test_a_full_queue_refuses_with_its_length_and_limit() -> None:
    cluster = Cluster(max_num_waiting=2)
    cluster.scheduler.add(make_sequence(1, 4, 4))
    cluster.scheduler.add(make_sequence(2, 4, 4))
    with pytest.raises(CapacityError, match="2 sequences are waiting, the limit is 2"):
        cluster.scheduler.add(make_sequence(3, 4, 4))


class Costly(SequenceFeature):
    """As a grammar whose masks take long."""

    forces_tokens = True  # though it knows none
    takes_s = 2 * MAX_HOST_S

    @property
    def host_s(self) -> float:
        return self.takes_s


def test_prompts_that_end_together_take_turns_if_their_first_tokens_take_long_of_the_host() -> None:
    cluster = Cluster(max_num_seqs=12, max_num_batched_tokens=64, num_blocks=64)
    costly = range(8)
    for seq_id in range(12):
        sequence = make_sequence(seq_id, 3, 2)
        if seq_id in costly:
            sequence.features = (Costly(),)
        cluster.scheduler.add(sequence)
    while cluster.scheduler.num_running or cluster.scheduler.num_waiting or cluster.in_flight is not None:
        cluster.step()
    counts = [sum(each.seq_id in costly for each in plan.entries) for plan in cluster.plans]
    assert max(counts) == 1 and sum(counts) == 2 * len(costly)
    assert {8, 9, 10, 11} <= {each.seq_id for each in cluster.plans[1].entries}, "the others wait for none of them"
    assert {each.sequence.seq_id for each in cluster.outputs if each.finish_reason is not None} == set(range(12))


def test_streams_take_turns_from_when_their_tokens_take_long_of_the_host_until_they_do_no_more() -> None:
    cluster = Cluster(max_num_seqs=6, max_num_batched_tokens=64, num_blocks=64)
    sequences, costly = [make_sequence(seq_id, 3, 30) for seq_id in range(6)], [Costly() for _ in range(3)]
    for sequence, feature in zip(sequences, costly, strict=False):
        feature.takes_s = 0.0
        sequence.features = (feature,)
    for sequence in sequences:
        cluster.scheduler.add(sequence)
    num_entries = list[int]()
    for takes_s in (0.0, MAX_HOST_S / 2, MAX_HOST_S / 4, 0.0):
        for feature in costly:
            feature.takes_s = takes_s
        for _ in range(6):
            cluster.step()
        plan = cluster.plans[-1]
        assert {3, 4, 5} <= {each.seq_id for each in plan.entries}, "the others wait for none of them"
        num_entries.append(len(plan.entries))
    assert num_entries == [6, 5, 6, 6], "two of the three take as long as may be"
    assert all(each.slot is not None for each in sequences)
    cluster.run_until_idle()
    assert [each.output_token_ids for each in sequences] == [expected_output(each) for each in sequences]
