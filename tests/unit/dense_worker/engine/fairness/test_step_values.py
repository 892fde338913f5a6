"""Prompts that report many values of each token: steps stay short for others, and each client advances."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from services.dense_worker.engine.fairness.step_shares import MAX_VALUES, limit_values
from services.dense_worker.engine.sequence import Sequence
from services.step import StepPlan
from tests.support.dense.scheduler_cluster import expected_output, make_sequence
from tests.support.dense.sequences import ask
from tests.support.reports import prompt_logprobs
from tests.unit.dense_worker.engine.fairness.test_fair_scheduler import SharedCluster

VOCAB_SIZE = 1024
prompts = st.tuples(
    st.integers(0, 3),  # client
    st.one_of(st.none(), st.integers(0, 60)),  # most likely tokens to report of each token
    st.integers(2, 50),  # tokens
)


@settings(deadline=None)
@given(st.lists(prompts, max_size=12), st.integers(1, 400))
def test_the_limit_holds_and_is_used_and_each_client_advances(
    wishes: list[tuple[int, int | None, int]], limit: int
) -> None:
    prefills = []
    for number, (client, num_logprobs, num_tokens) in enumerate(wishes):
        sequence = make_sequence(number, num_tokens, 4)
        ask(sequence, client=client, features=prompt_logprobs(num_logprobs))
        prefills.append((sequence, num_tokens))
    limited = dict(limit_values(prefills, limit))
    tokens, values, most = Counter[int](), Counter[int](), Counter[int]()
    is_cut = set()
    for (client, num_logprobs, num_tokens), (sequence, _) in zip(wishes, prefills, strict=True):
        if num_logprobs is None:
            assert limited[sequence] == num_tokens
            continue
        assert 0 <= limited.get(sequence, 0) <= num_tokens
        tokens[client] += limited.get(sequence, 0)
        values[client] += (1 + num_logprobs) * limited.get(sequence, 0)
        most[client] = max(most[client], 1 + num_logprobs)
        if limited.get(sequence, 0) < num_tokens:
            is_cut.add(client)
    assert all(tokens.values())
    assert sum(count for client, count in values.items() if tokens[client] > 1) <= limit
    for client in is_cut:
        assert values[client] + most[client] > limit // len(tokens), "a client that wants more gets its even share"


def values_of(plan: StepPlan, sequences: dict[int, Sequence]) -> int:
    """How many log-probabilities a step reports: the row of each token of a prompt but the last one has some."""
    return sum(
        sequences[each.seq_id].num_values_per_token
        * max(0, min(each.num_tokens, sequences[each.seq_id].num_prompt_tokens - 1 - each.position))
        for each in plan.entries
        if each.seq_id in sequences
    )


def test_prompts_that_report_the_vocabulary_advance_in_short_steps_beside_others() -> None:
    cluster = SharedCluster(num_blocks=2000, max_num_seqs=64, max_num_batched_tokens=512, max_model_len=512)
    heavy = {}
    for _ in range(8):
        sequence = cluster.arrive(1, 100, 2)
        ask(sequence, features=prompt_logprobs(VOCAB_SIZE))
        heavy[sequence.seq_id] = sequence
    cluster.run(3)
    light = cluster.arrive(2, 200, 3)
    ask(light, features=prompt_logprobs(2))
    plain = [cluster.arrive(client, 120, 3) for client in (1, 2)]
    before = len(cluster.plans)
    cluster.run(3)
    for sequence in (light, *plain):
        first = next(e for plan in cluster.plans[before:] for e in plan.entries if e.seq_id == sequence.seq_id)
        assert first.num_tokens == sequence.num_prompt_tokens, "a prompt with few values, or none, is computed at once"
    cluster.run_until_idle()
    sequences = {**heavy, light.seq_id: light}
    assert all(values_of(plan, sequences) <= MAX_VALUES for plan in cluster.plans)
    ends = {e.seq_id: number for number, plan in enumerate(cluster.plans) for e in plan.entries}
    for number, plan in enumerate(cluster.plans[: max(ends[seq_id] for seq_id in heavy)]):
        assert heavy.keys() & {each.seq_id for each in plan.entries}, f"step {number} advances none of them"
    assert sorted(heavy, key=lambda seq_id: ends[seq_id]) == list(heavy), "a client's prompts are served in order"
    for sequence in (*sequences.values(), *plain):
        assert list(sequence.output_token_ids) == expected_output(sequence)


def test_a_token_with_more_values_than_a_step_may_have_is_computed_by_itself() -> None:
    first, second, other = (make_sequence(number, 10, 1) for number in range(3))
    for sequence, client in ((first, 1), (second, 1), (other, 2)):
        ask(sequence, client=client, features=prompt_logprobs(2 * MAX_VALUES))
    assert first.spec.client_id == second.spec.client_id != other.spec.client_id
    assert limit_values([(first, 10), (second, 10), (other, 10)]) == [(first, 1), (other, 1)]


def test_prompts_of_a_short_step_that_has_room_for_their_values_are_computed_as_without_a_limit() -> None:
    """Each step for one of them, not for a few tokens of each."""
    cluster = SharedCluster(num_blocks=2000, max_num_seqs=64, max_num_batched_tokens=128, max_model_len=512)
    for client in (1, 1, 1, 1):
        ask(cluster.arrive(client, 256, 1), features=prompt_logprobs(20))
    cluster.run_until_idle()
    assert [[each.num_tokens for each in plan.entries] for plan in cluster.plans if plan.entries] == [[128]] * 8
