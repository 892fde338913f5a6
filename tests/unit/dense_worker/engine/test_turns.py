"""What the scheduler does where sequences take turns in the KV cache."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from services.attn_worker.cache.tiers.tier import NoTier
from services.dense_worker.engine.sequence import Sequence, SequenceStatus
from services.dense_worker.engine.session import ScheduledStep
from services.step import StepPlan
from tests.support.dense.scheduler_cluster import (
    BLOCK_SIZE,
    Cluster,
    check_outputs,
    make_sequence,
    requests,
    run_arrivals,
)
from tests.support.dense.sequences import ask
from tests.support.examples import examples


class TurnsCluster(Cluster):
    """Checks at each step what cache and host memory have to hold together.

    Sequences are chosen while a step ends, too, as the engine does when calls come.
    """

    def __init__(self, num_blocks: int, num_host_blocks: int, turn_tokens: int, **limits: int) -> None:
        limits = {"num_host_blocks": num_host_blocks, "turn_tokens": turn_tokens, **limits}
        super().__init__("take_turns", num_blocks, **limits)
        self.begun: dict[int, Sequence] = {}

    def attach_again(self) -> None:
        super().attach_again()
        self.begun.clear()

    def check(self, plan: StepPlan) -> None:
        """Not the order of entries: where prompts of several clients share a step, any may be cut to one token."""
        assert plan.num_tokens <= self.limits.max_num_batched_tokens
        assert len(plan.entries) <= self.limits.max_num_seqs

    def step(self, *, answer_opens: bool = True) -> None:
        super().step(answer_opens=answer_opens)
        self.begun |= {each.seq_id: each for each in self.scheduler.session.running}
        live = [each for each in self.begun.values() if each.status is not SequenceStatus.FINISHED]
        most = sum(-(-each.max_num_cached_tokens // BLOCK_SIZE) for each in live)
        assert most <= self.cache.num_blocks + self.num_host_blocks, "who has begun can always come back"

    def _complete(self, published: ScheduledStep) -> None:
        chosen = self.scheduler.next_to_open()
        self._opening.extend(each for each in chosen if each.status is SequenceStatus.OPENING)
        super()._complete(published)


@settings(max_examples=examples(150), deadline=None)
@given(
    requests,
    st.integers(16, 40),
    st.integers(0, 80),
    st.integers(1, 12),
    st.integers(1, 6),
    st.integers(6, 40),
    st.integers(1, 3),
    st.booleans(),
    st.integers(1, 3),
    st.sets(st.integers(1, 60), max_size=3),
)
def test_every_sequence_gets_its_tokens_and_every_block_is_freed(
    arrivals: list[tuple[int, int, bool, int, int | None]],
    num_blocks: int,
    num_host_blocks: int,
    turn_tokens: int,
    max_num_seqs: int,
    budget: int,
    answer_every: int,
    enable_prefix_cache: bool,
    num_clients: int,
    resets: set[int],
) -> None:
    cluster = TurnsCluster(
        num_blocks,
        num_host_blocks,
        turn_tokens,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_prefix_cache=enable_prefix_cache,
    )

    def prepare(sequence: Sequence) -> None:
        ask(sequence, client=sequence.seq_id % num_clients)

    check_outputs(*run_arrivals(cluster, arrivals, answer_every, resets=resets, prepare=prepare))


def _ended_at(cluster: Cluster, num_sequences: int, prompt_len: int, max_tokens: int) -> list[int]:
    """By sequence, in how many steps it had its last token."""
    sequences = [make_sequence(seq_id, prompt_len, max_tokens) for seq_id in range(1, num_sequences + 1)]
    for each in sequences:
        cluster.scheduler.add(each)
    ended = dict[int, int]()
    for number in range(1, 1000):
        cluster.step()
        for each in sequences:
            if each.status is SequenceStatus.FINISHED:
                ended.setdefault(each.seq_id, number)
        if len(ended) == num_sequences:
            break
    cluster.run_until_idle()
    return [ended[each.seq_id] for each in sequences]


def test_more_sequences_than_fit_advance_about_as_fast() -> None:
    # 20 + 40 tokens are 15 blocks; two sequences fit into 32 blocks, three take turns.
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    one_by_one = _ended_at(Cluster(num_blocks=32, **limits), 3, 20, 40)
    in_turns = _ended_at(TurnsCluster(32, 64, 8, **limits), 3, 20, 40)
    assert one_by_one[2] > 80, "the third one begins when another has ended"
    assert max(in_turns) < 75
    assert max(in_turns) - min(in_turns) < 30


def test_who_waits_has_had_as_many_tokens_as_others_or_more() -> None:
    cluster = TurnsCluster(32, 200, 8, max_num_seqs=8, max_num_batched_tokens=64)
    sequences = [make_sequence(seq_id, 20, 40) for seq_id in range(1, 6)]
    for each in sequences:
        cluster.scheduler.add(each)
    most = 0
    while any(each.status is not SequenceStatus.FINISHED for each in sequences):
        cluster.step()
        numbers = [len(each.output_token_ids) for each in sequences if each.status is not SequenceStatus.FINISHED]
        if numbers and min(numbers):
            most = max(most, max(numbers) - min(numbers))
    assert 8 <= most <= 3 * 8 + BLOCK_SIZE, "nobody is more than about two turns ahead"
    assert cluster.scheduler.num_preemptions > 5


def test_a_sequence_begins_only_if_cache_and_host_memory_have_room_for_all_of_it() -> None:
    cluster = TurnsCluster(32, 10, 8, max_num_seqs=8, max_num_batched_tokens=64)  # 42 blocks: two sequences of 15
    for seq_id in range(1, 5):
        cluster.scheduler.add(make_sequence(seq_id, 20, 40))
    for _ in range(20):
        cluster.step()
    assert sorted(cluster.begun) == [1, 2]
    cluster.run_until_idle()
    assert sorted(cluster.begun) == [1, 2, 3, 4]


def test_a_new_sequence_that_has_no_room_keeps_nobody_from_coming_back() -> None:
    cluster = TurnsCluster(16, 40, 4, max_num_seqs=8, max_num_batched_tokens=64)  # 56 blocks: three of 15
    for seq_id in range(1, 4):
        cluster.scheduler.add(make_sequence(seq_id, 20, 40))
    while len(cluster.begun) < 3 or not cluster.scheduler.num_preemptions:
        cluster.step()
    late = make_sequence(4, 20, 40)
    cluster.scheduler.add(late)
    while late.seq_id not in cluster.begun:
        cluster.step()
    ended = [each.seq_id for each in cluster.begun.values() if each.status is SequenceStatus.FINISHED]
    assert ended, "it begins when one that has begun has ended, which others did not prevent"
    cluster.run_until_idle()


def test_nobody_gives_way_to_another_client_that_may_not_begin() -> None:
    cluster = TurnsCluster(24, 45, 4, max_num_seqs=8, max_num_batched_tokens=64)  # 69 blocks: four sequences of 15
    for seq_id in range(1, 5):
        cluster.scheduler.add(make_sequence(seq_id, 8, 50))
    while len(cluster.begun) < 4:
        cluster.step()
    late = make_sequence(5, 8, 50)
    ask(late, client=1)
    cluster.scheduler.add(late)
    while late.seq_id not in cluster.begun:
        cluster.step()
    assert any(each.status is SequenceStatus.FINISHED for each in cluster.begun.values())
    cluster.run_until_idle()


def test_what_leaves_for_others_is_copied_before_and_what_ends_is_not() -> None:
    cluster = TurnsCluster(32, 64, 8, max_num_seqs=4, max_num_batched_tokens=64)
    for seq_id in range(1, 4):
        cluster.scheduler.add(make_sequence(seq_id, 20, 40))
    cluster.run_until_idle()
    num_left, announced = 0, set[int]()
    for plan in cluster.plans:
        for seq_id in set(plan.close_seq_ids).intersection(plan.kept_seq_ids):
            num_left += 1
            assert seq_id in announced, "its blocks are on their way some steps before it is closed"
            announced.discard(seq_id)
        announced.update(set(plan.kept_seq_ids).difference(plan.close_seq_ids))
    assert num_left == cluster.scheduler.num_preemptions > 0


class _KeepsAll(NoTier):
    """A tier that has a copy of a block as soon as it is offered."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = set[bytes]()

    def has(self, digest: bytes) -> bool:
        return digest in self.kept

    def offer(self, digests: Iterable[bytes], *, is_urgent: bool = False) -> None:
        self.kept.update(digests)


class _TierCluster(TurnsCluster):
    """Whose KV cache has a tier."""

    def __init__(self, num_blocks: int, num_host_blocks: int, turn_tokens: int, **limits: int) -> None:
        super().__init__(num_blocks, num_host_blocks, turn_tokens, **limits)
        self.cache.use_tier(_KeepsAll(), copies_full_blocks=False)

    def answer_opens(self) -> None:
        while self._opening:
            answer = self.cache.open_sequence(self._opening.popleft().describe())
            self.cache.register_loaded(answer.missing)
            self.scheduler.opened(answer)


def test_no_token_is_computed_twice_for_turns() -> None:
    cluster = _TierCluster(32, 64, 8, max_num_seqs=4, max_num_batched_tokens=64)
    for seq_id in range(1, 4):
        cluster.scheduler.add(make_sequence(seq_id, 20, 40))
    cluster.run_until_idle()
    assert cluster.scheduler.num_preemptions > 0
    assert sum(plan.num_tokens for plan in cluster.plans) == 3 * (20 + 40 - 1), "the last token of each is not computed"


def test_nothing_is_copied_while_nobody_waits() -> None:
    cluster = TurnsCluster(32, 64, 8, max_num_seqs=4, max_num_batched_tokens=64)
    cluster.scheduler.add(make_sequence(1, 20, 40))
    cluster.run_until_idle()
    assert not any(plan.kept_seq_ids for plan in cluster.plans)


def test_who_was_to_leave_and_has_left_for_another_reason_stays_when_it_comes_back() -> None:
    cluster = TurnsCluster(32, 64, 8, max_num_seqs=4, max_num_batched_tokens=64)
    sequences = {seq_id: make_sequence(seq_id, 20, 40) for seq_id in range(1, 4)}
    for each in sequences.values():
        cluster.scheduler.add(each)
    while not (cluster.plans and cluster.plans[-1].kept_seq_ids):
        cluster.step()
    leaving, *_ = cluster.plans[-1].kept_seq_ids
    cluster.scheduler.session.preempt(sequences.pop(leaving))
    for seq_id in sequences:
        cluster.scheduler.cancel(seq_id)
    num_before = cluster.scheduler.num_preemptions
    cluster.run_until_idle()
    assert cluster.scheduler.num_preemptions == num_before


def test_nobody_leaves_for_blocks_of_others_that_have_no_place() -> None:
    cluster = TurnsCluster(32, 200, 8, max_num_seqs=1, max_num_batched_tokens=64)
    sequences = [make_sequence(seq_id, 20, 40) for seq_id in range(1, 7)]
    for each in sequences:
        each.arrival_s = 100.0 * each.seq_id  # nobody comes before one that has begun
        cluster.scheduler.add(each)
    cluster.run_until_idle()
    ended = [each.sequence.seq_id for each in cluster.outputs if each.finish_reason is not None]
    assert (ended, cluster.scheduler.num_preemptions) == ([1, 2, 3, 4, 5, 6], 0)


def _two_that_fit(num_host_blocks: int) -> tuple[TurnsCluster, Sequence, Sequence]:
    """Two sequences in the middle of their outputs, for which 30 of 32 blocks are enough, and one that needs 16."""
    cluster = TurnsCluster(32, num_host_blocks, 8, max_num_seqs=4, max_num_batched_tokens=64)
    first, second, late = make_sequence(1, 20, 40), make_sequence(2, 20, 40), make_sequence(3, 54, 8)
    for each in (first, second):
        cluster.scheduler.add(each)
    while len(first.output_token_ids) < 12:
        cluster.step()
    cluster.scheduler.add(late)
    return cluster, first, late


def test_one_that_comes_late_begins_before_those_end_that_need_no_blocks_of_others() -> None:
    cluster, first, late = _two_that_fit(num_host_blocks=64)
    while not late.output_token_ids:
        cluster.step()
    assert first.status is not SequenceStatus.FINISHED
    cluster.run_until_idle()


def test_nobody_leaves_for_one_that_may_not_begin() -> None:
    cluster, _, late = _two_that_fit(num_host_blocks=0)
    cluster.run_until_idle()
    assert late.status is SequenceStatus.FINISHED and not cluster.scheduler.num_preemptions
