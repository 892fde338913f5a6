"""A client with many streams and one with few, with the real scheduler and KV cache accounting, without a model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.dense_worker.engine.limits import Policy
from services.dense_worker.engine.sequence import Sequence, SequenceStatus
from services.step import StepPlan
from tests.support.dense.scheduler_cluster import Cluster, expected_output, make_sequence
from tests.support.dense.sequences import ask
from tests.support.examples import examples

POLICIES: list[Policy] = ["guaranteed_no_evict", "max_utilization"]
STEPS_TO_OPEN = 1  # one plan has already been made when the new client arrives


class SharedCluster(Cluster):
    """A cluster whose steps are divided among clients, so that any prompt may get a single token."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.num_sequences = 0
        self.clients: dict[int, int] = {}  # by seq_id

    def check(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.limits.max_num_batched_tokens
        assert len(plan.entries) <= self.limits.max_num_seqs
        assert len({entry.seq_id for entry in plan.entries}) == len(plan.entries)
        assert all(entry.num_tokens >= 1 for entry in plan.entries)

    def arrive(
        self, client: int, prompt_len: int, max_tokens: int, *, tenant: int = 0, priority: int = 0
    ) -> Sequence:
        self.num_sequences += 1
        sequence = make_sequence(self.num_sequences, prompt_len, max_tokens)
        ask(sequence, client=client, tenant=tenant, priority=priority)
        self.clients[sequence.seq_id] = client
        sequence.arrival_s = float(self.num_sequences) / 1000
        # Prompts of different sequences share no blocks.
        ask(sequence, prompt_token_ids=[100 + self.num_sequences] * prompt_len)
        self.scheduler.add(sequence)
        return sequence

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def steps_until_planned(self, sequence: Sequence) -> int:
        """The number of plans up to the one that computes the end of the prompt, and with it the first token."""
        before = len(self.plans)
        while not sequence.output_token_ids:
            self.step()
            assert len(self.plans) < before + 100, "the sequence is starved"
        last = next(
            number
            for number, plan in enumerate(self.plans[before:], start=1)
            if any(entry.seq_id == sequence.seq_id and entry.num_logits for entry in plan.entries)
        )
        return last

    def tokens_since(self, first_plan: int) -> Counter[int]:
        """The number of tokens in the plans from `first_plan` on, by client."""
        tokens = Counter[int]()
        for plan in self.plans[first_plan:]:
            for entry in plan.entries:
                tokens[self.clients[entry.seq_id]] += entry.num_tokens
        return tokens

    @property
    def num_running_by_client(self) -> Counter[int]:
        return Counter(sequence.spec.client for sequence in self.scheduler.session.running)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_steps", [1, 2, 7, 20])
def test_a_new_client_gets_its_first_token_in_the_next_step_beside_500_other_streams(
    policy: Policy, num_steps: int
) -> None:
    cluster = SharedCluster(policy, num_blocks=400, max_num_seqs=8, max_num_batched_tokens=64)
    for _ in range(500):
        cluster.arrive(1, 4, 50)
    cluster.run(num_steps)
    newcomer = cluster.arrive(2, 8, 4)
    assert cluster.steps_until_planned(newcomer) <= 1 + STEPS_TO_OPEN
    assert cluster.num_running_by_client[1] == 7, "only one sequence of client 1 must give way"


def test_what_a_waiting_client_needs_is_computed_only_if_it_may_get_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of clients may wait, and those with a right to places are looked at a few at a time."""
    cluster = SharedCluster(num_blocks=4000, max_num_seqs=8, max_num_batched_tokens=64)
    admission, computed = cluster.scheduler._admission, list[int]()
    need_of = admission._need_of

    def noted(sequence: Sequence) -> Any:
        computed.append(sequence.seq_id)
        return need_of(sequence)

    for client in range(1, 301):
        cluster.arrive(client, 4, 50)
    monkeypatch.setattr(admission, "_need_of", noted)
    cluster.run(4)
    assert cluster.num_running_by_client.total() == 8
    assert not computed, "each running client has one place, which nobody may take"


def streaming_cluster(num_clients: int, **options: Any) -> SharedCluster:
    """Eight running streams of one or of several clients."""
    cluster = SharedCluster(num_blocks=400, max_num_seqs=16, max_num_batched_tokens=64, **options)
    for number in range(8):
        cluster.arrive(number % num_clients, 4, 50)
    cluster.run(4)
    return cluster


def test_most_streams_of_one_client_give_way_for_one_step_to_a_new_client() -> None:
    cluster = streaming_cluster(1)
    new = [cluster.arrive(client, 20, 30) for client in (11, 12)]
    before = len(cluster.plans)
    cluster.run(4)
    new_seq_ids = {each.seq_id for each in new}
    sizes = [[entry.seq_id in new_seq_ids for entry in plan.entries] for plan in cluster.plans[before:]]
    first = next(number for number, size in enumerate(sizes) if any(size))
    assert sizes[first] == [True, True], "a step of its own"
    assert sizes[first + 1].count(False) == 8, "and the next one is for all"


def test_streams_of_many_clients_do_not_give_way() -> None:
    cluster = streaming_cluster(4)
    new = cluster.arrive(11, 20, 30)
    before = len(cluster.plans)
    cluster.run(4)
    for plan in cluster.plans[before:]:
        assert sum(entry.seq_id != new.seq_id for entry in plan.entries) == 8


def test_new_clients_without_end_do_not_stop_the_streams_of_another_one() -> None:
    cluster = streaming_cluster(1)
    streams = list(cluster.scheduler.session.running)
    before = [len(stream.output_token_ids) for stream in streams]
    for client in range(100, 120):
        cluster.arrive(client, 4, 1)
        cluster.step()
    cluster.run(2)
    assert all(len(stream.output_token_ids) - start >= 9 for stream, start in zip(streams, before, strict=True))


def test_a_plan_waits_for_the_opening_of_a_new_client() -> None:
    cluster = streaming_cluster(1, is_known_empty=False)
    new = cluster.arrive(11, 20, 30)
    cluster.step(answer_opens=False)
    before = len(cluster.plans)
    cluster.step(answer_opens=False)
    assert len(cluster.plans) == before, "no plan is made without the new client"
    cluster.step()
    assert [entry.seq_id for entry in cluster.plans[-1].entries] == [new.seq_id]


def test_a_new_client_gets_blocks_that_are_reserved_by_another_one() -> None:
    cluster = SharedCluster(num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64)
    for _ in range(20):
        cluster.arrive(1, 4, 60)  # 16 blocks each, so four of them reserve the whole cache
    cluster.run(5)
    assert cluster.num_running_by_client[1] == 4 and not cluster.scheduler.session.ledger.num_available_blocks
    newcomer = cluster.arrive(2, 8, 4)
    assert cluster.steps_until_planned(newcomer) <= 1 + STEPS_TO_OPEN


def test_a_new_client_gets_used_blocks_after_the_plan_that_frees_them() -> None:
    cluster = SharedCluster(num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64)
    for _ in range(20):
        cluster.arrive(1, 60, 4)
    cluster.run(6)
    newcomer = cluster.arrive(2, 60, 4)
    assert cluster.steps_until_planned(newcomer) <= 1 + STEPS_TO_OPEN + 3


@pytest.mark.parametrize("num_blocks", [20 * 14, 20 * 14 + 13])
def test_blocks_given_up_for_a_client_are_not_taken_back_by_the_one_that_gave_them(num_blocks: int) -> None:
    cluster = SharedCluster(num_blocks=num_blocks, max_num_seqs=64, max_num_batched_tokens=64)
    for _ in range(50):
        cluster.arrive(1, 4, 52)  # 14 blocks each, so that 20 fill the cache
    cluster.run(12)
    assert cluster.num_running_by_client == {1: 20}
    for _ in range(50):
        cluster.arrive(2, 4, 52)
    cluster.run(25)
    assert cluster.num_running_by_client[2] >= 8, "nearly half"
    num_preemptions = cluster.scheduler.num_preemptions
    assert num_preemptions <= 10, "one for each"
    cluster.run(10)
    assert cluster.scheduler.num_preemptions == num_preemptions


@pytest.mark.parametrize("tenant", [0, 1])
def test_two_clients_with_many_streams_get_half_of_the_tokens_each(tenant: int) -> None:
    cluster = SharedCluster(num_blocks=400, max_num_seqs=8, max_num_batched_tokens=64)
    for _ in range(100):
        cluster.arrive(1, 4, 50)
    cluster.run(10)
    for _ in range(100):
        cluster.arrive(2, 4, 50, tenant=tenant)
    cluster.run(4)
    assert cluster.num_running_by_client == {1: 5, 2: 3}
    assert cluster.scheduler.num_preemptions == 3
    cluster.run(60)  # until the first sequences end
    before = len(cluster.plans)
    cluster.run(600)
    tokens = cluster.tokens_since(before)
    assert abs(tokens[1] - tokens[2]) <= 0.1 * tokens.total()
    assert cluster.scheduler.num_preemptions <= 3 + 5, "equal clients take hardly anything from each other"


def test_the_clients_of_one_tenant_divide_its_share() -> None:
    cluster = SharedCluster(num_blocks=400, max_num_seqs=8, max_num_batched_tokens=64)
    for client, tenant in ((1, 1), (2, 2), (3, 2)):
        for _ in range(50):
            cluster.arrive(client, 4, 50, tenant=tenant)
        cluster.run(3)
    cluster.run(60)
    before = len(cluster.plans)
    cluster.run(300)
    tokens = cluster.tokens_since(before)
    assert abs(tokens[1] - tokens[2] - tokens[3]) <= 0.1 * tokens.total()
    assert abs(tokens[2] - tokens[3]) <= 0.1 * tokens.total()


def test_more_urgent_streams_are_not_preempted_for_a_new_client() -> None:
    cluster = SharedCluster(num_blocks=400, max_num_seqs=4, max_num_batched_tokens=64)
    for _ in range(4):
        cluster.arrive(1, 4, 20, priority=-1)
    cluster.run(4)
    cluster.arrive(2, 4, 4)
    cluster.run(10)
    assert cluster.num_running_by_client == {1: 4} and not cluster.scheduler.num_preemptions


def test_a_single_client_causes_no_preemption() -> None:
    cluster = SharedCluster(num_blocks=400, max_num_seqs=4, max_num_batched_tokens=64)
    for _ in range(30):
        cluster.arrive(1, 4, 20)
    cluster.run_until_idle()
    assert not cluster.scheduler.num_preemptions


def test_short_requests_run_although_another_client_fills_the_cache() -> None:
    cluster = SharedCluster("max_utilization", num_blocks=32, max_num_seqs=8, max_num_batched_tokens=64)
    for _ in range(40):
        cluster.arrive(1, 8, 50)
    cluster.run(30)
    for _ in range(10):
        short = cluster.arrive(2, 6, 6)
        before = len(cluster.plans)
        while short.status is not SequenceStatus.FINISHED:
            cluster.step()
            assert len(cluster.plans) <= before + 6 + 12, "it waits for the other client's streams"
    cluster.run_until_idle()


arrivals = st.lists(
    st.tuples(
        st.integers(0, 3),  # client
        st.integers(0, 1),  # tenant
        st.integers(-1, 1),  # priority
        st.integers(1, 30),  # prompt
        st.integers(1, 30),  # max_tokens
        st.integers(0, 3),  # steps before the next one
        st.booleans(),  # whether it is cancelled later
    ),
    min_size=2,
    max_size=16,
)


@settings(max_examples=examples(200), deadline=None)
@given(
    arrivals, st.sampled_from(POLICIES), st.integers(16, 40), st.integers(1, 6), st.integers(6, 40), st.booleans()
)
def test_every_client_gets_its_tokens_and_every_block_is_freed(
    requests: list[tuple[int, int, int, int, int, int, bool]],
    policy: Policy,
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    attaches_again: bool,
) -> None:
    cluster = SharedCluster(policy, num_blocks, max_num_seqs, budget)
    sequences, cancelled = [], set()
    for client, tenant, priority, prompt_len, max_tokens, gap, is_cancelled in requests:
        sequences.append(cluster.arrive(client, prompt_len, max_tokens, tenant=tenant, priority=priority))
        cluster.run(gap)
        if is_cancelled:
            cancelled.add(victim := sequences[len(sequences) // 2])
            cluster.scheduler.cancel(victim.seq_id)
    if attaches_again:
        cluster.attach_again()
    cluster.run_until_idle(20_000)
    for sequence in sequences:
        assert sequence in cancelled or sequence.output_token_ids == expected_output(sequence)
    assert all(sequence.status is SequenceStatus.FINISHED for sequence in sequences)
    assert not cluster.scheduler.num_waiting
