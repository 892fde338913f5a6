"""Sequences with adapters in the real scheduler and KV cache: slots, turns, errors; nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import InvalidRequest, RequestAborted
from services.dense_worker.engine.limits import Policy
from services.dense_worker.engine.scheduler import Scheduler
from services.dense_worker.engine.sequence import FinishReason, Sequence, SequenceStatus
from services.dense_worker.features.adapters.adapter_feature import AdapterFeature, SequenceAdapter
from services.lora.adapter import Adapter
from services.pb import dense_pb2
from tests.support.dense.scheduler_cluster import Cluster, expected_output, make_sequence, new_attachment
from tests.support.dense.sequences import ask
from tests.support.examples import examples

ADAPTERS = [Adapter(name, name * 64, f"/{name}") for name in "abcde"]


def slot_of(sequence: Sequence) -> int | None:
    """Where the adapter of a sequence is; None while it is not in the cache, or without an adapter."""
    return next((each.slot for each in sequence.features if isinstance(each, SequenceAdapter)), None)


class AdapterCluster(Cluster):
    """A cluster whose loads end some steps after they began. It checks each plan and each load."""

    def __init__(self, num_slots: int, load_steps: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.slots: list[Adapter | None] = [None] * num_slots  # what has been loaded
        self.loads: list[str] = []  # names, in order
        self.failing: set[str] = set()  # names of adapters that cannot be loaded
        self._load_steps = load_steps
        self._loading: list[list[Any]] = []  # steps left, slot, adapter, whom to tell
        self._stale: list[list[Any]] = []  # the same of an attachment before
        self._attaches = False
        self.feature = AdapterFeature(num_slots, self)
        self.feature.start(lambda event: self.outputs.extend(self.scheduler.handle(event)))
        self.scheduler = Scheduler(self.limits, features=[self.feature])
        self.scheduler.begin(new_attachment(self.cache, num_host_blocks=self.num_host_blocks))
        self.sequences: dict[int, Sequence] = {}

    def add(self, seq_id: int, adapter: Adapter | None, prompt_len: int = 3, max_tokens: int = 4) -> Sequence:
        sequence = self.sequences[seq_id] = make_sequence(seq_id, prompt_len, max_tokens)
        ask(sequence, adapter=adapter)
        if adapter is not None:
            sequence.features = (self.feature.admit(sequence.spec, dense_pb2.Submit(), stream=1),)
        self.scheduler.add(sequence)
        return sequence

    def step(self, *, answer_opens: bool = True) -> None:
        super().step(answer_opens=answer_opens)
        for each in self._stale:
            each[3](each[1], None)
        self._stale.clear()
        for each in list(self._loading):
            each[0] -= 1
            if each[0] <= 0:
                self._loading.remove(each)
                self._end_load(*each[1:])

    def check(self, plan: Any) -> None:
        super().check(plan)
        for entry in plan.entries:
            sequence = self.sequences[entry.seq_id]
            if sequence.spec.adapter is not None:
                slot = slot_of(sequence)
                assert slot is not None and self.slots[slot] == sequence.spec.adapter

    def attach_again(self, with_ranks: bool = False) -> None:
        """With ranks: others have been started again, and their slots are empty. What was being loaded is told late."""
        if with_ranks:
            self.in_flight, self._attaches = None, True
            self.slots = [None] * len(self.slots)
            self._stale, self._loading = self._loading, []
            ranks: Any = object()
            self.feature.attached(ranks)
            self._attaches = False
        super().attach_again()

    def use_ranks(self, ranks: object) -> None:
        pass

    def load(self, slot: int, adapter: Adapter, on_done: Callable[[int, RequestAborted | None], None]) -> None:
        session = self.scheduler.session
        in_use = [*session.running, *(opening.sequence for opening in session.openings.values())]
        is_used = slot in [slot_of(each) for each in in_use]
        assert self._attaches or not is_used, "a sequence in the cache uses the slot"
        for published in [] if self.in_flight is None else [self.in_flight]:
            running = [entry.sequence.spec.adapter for entry in published.entries]
            assert self.slots[slot] is None or self.slots[slot] not in running, "a step under way reads the slot"
        assert adapter not in self.slots, "it has a slot"
        self.slots[slot] = None
        self.loads.append(adapter.name)
        self._loading.append([self._load_steps, slot, adapter, on_done])

    def _end_load(self, slot: int, adapter: Adapter, on_done: Callable[[int, RequestAborted | None], None]) -> None:
        error = RequestAborted("damaged") if adapter.name in self.failing else None
        self.slots[slot] = None if error else adapter
        on_done(slot, error)

    def order_of_ends(self) -> list[int]:
        return [output.sequence.seq_id for output in self.outputs if output.finish_reason is not None]


@settings(max_examples=examples(120), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([None, *ADAPTERS]),
            st.integers(1, 20),  # prompt
            st.integers(1, 12),  # max_tokens
            st.integers(0, 3),  # steps before the next request
            st.none() | st.integers(1, 10),  # steps after which it is cancelled
        ),
        min_size=1,
        max_size=14,
    ),
    st.sampled_from(["guaranteed_no_evict", "max_utilization", "take_turns"]),
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(1, 4),
    st.sampled_from(["", "alone", "with ranks"]),
)
def test_every_sequence_gets_its_tokens_with_its_adapter(
    arrivals: list[tuple[Adapter | None, int, int, int, int | None]],
    policy: Policy,
    num_slots: int,
    load_steps: int,
    max_num_seqs: int,
    attaches_again: str,
) -> None:
    limits = {"max_num_seqs": max_num_seqs, "num_host_blocks": 16, "turn_tokens": 4}
    cluster = AdapterCluster(num_slots, load_steps, policy=policy, num_blocks=16, **limits)
    cancels: list[list[int]] = []
    for seq_id, (adapter, prompt_len, max_tokens, gap, cancel_after) in enumerate(arrivals, start=1):
        cluster.add(seq_id, adapter, prompt_len, max_tokens)
        if cancel_after is not None:
            cancels.append([cancel_after, seq_id])
        for _ in range(gap):
            for cancel in cancels:
                cancel[0] -= 1
                if cancel[0] == 0:
                    cluster.scheduler.cancel(cancel[1])
            cluster.step()
    if attaches_again:
        cluster.attach_again(attaches_again == "with ranks")
    cluster.run_until_idle()
    cancelled = {seq_id for left, seq_id in cancels if left <= 0}
    for sequence in cluster.sequences.values():
        if sequence.seq_id not in cancelled:
            assert sequence.output_token_ids == expected_output(sequence)
        assert sequence.status is SequenceStatus.FINISHED and slot_of(sequence) is None


def test_a_sequence_waits_for_its_adapter_while_others_go_on() -> None:
    cluster = AdapterCluster(2, load_steps=30)
    cluster.add(1, ADAPTERS[0])
    cluster.add(2, None)
    cluster.add(3, None, max_tokens=8)
    cluster.run_until_idle()
    assert cluster.order_of_ends() == [2, 3, 1]


def test_the_least_recently_used_adapter_gives_up_its_slot() -> None:
    cluster = AdapterCluster(2)
    for seq_id, index in enumerate((0, 1, 0, 2, 0, 1), start=1):
        cluster.add(seq_id, ADAPTERS[index])
        cluster.run_until_idle()
    assert cluster.loads == ["a", "b", "c", "b"]


def test_equal_hashes_share_a_slot() -> None:
    cluster = AdapterCluster(1)
    cluster.add(1, ADAPTERS[0])
    cluster.add(2, Adapter("other name", ADAPTERS[0].hash, "/elsewhere"))
    cluster.check = lambda plan: None  # type: ignore[method-assign]  # it compares names
    cluster.run_until_idle()
    assert cluster.loads == ["a"]


def test_all_adapters_are_loaded_again_with_other_ranks() -> None:
    """Also those that were being loaded, of which the attachment before tells late: nobody runs before they are."""
    cluster = AdapterCluster(3, load_steps=3)
    for seq_id, adapter in enumerate(ADAPTERS[:2], start=1):
        cluster.add(seq_id, adapter, max_tokens=12)
        for _ in range(5):
            cluster.step()
    cluster.add(3, ADAPTERS[2])
    cluster.step()
    assert cluster.loads == ["a", "b", "c"] and not cluster.order_of_ends()
    cluster.attach_again(with_ranks=True)
    assert cluster.loads == ["a", "b", "c", "a", "b", "c"]
    cluster.run_until_idle()
    assert sorted(cluster.order_of_ends()) == [1, 2, 3] and len(cluster.loads) == 6


def test_an_adapter_in_constant_use_does_not_starve_another() -> None:
    """Sequences of `a` keep coming, so that its slot would never be free if nobody stopped them."""
    cluster = AdapterCluster(1)
    cluster.add(1, ADAPTERS[0], max_tokens=10)
    for _ in range(3):
        cluster.step()
    cluster.add(2, ADAPTERS[1])
    for seq_id in range(3, 30):
        cluster.add(seq_id, ADAPTERS[0], max_tokens=10)
        for _ in range(3):
            cluster.step()
    ends = cluster.order_of_ends()
    assert ends[:2] == [1, 2]
    cluster.run_until_idle()
    assert cluster.loads == ["a", "b", "a"]


def test_a_sequence_whose_adapter_is_taken_between_its_turns_keeps_no_blocks_from_the_next_one() -> None:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "turn_tokens": 4}
    cluster = AdapterCluster(1, policy="take_turns", num_blocks=16, num_host_blocks=12, **limits)
    first = cluster.add(1, ADAPTERS[0], prompt_len=20, max_tokens=30)  # 13 blocks
    cluster.add(2, None, prompt_len=20, max_tokens=30)
    while not first.output_token_ids:
        cluster.step()
    cluster.add(3, ADAPTERS[1], prompt_len=20, max_tokens=44)  # 16 blocks: all of the KV cache
    cluster.run_until_idle(max_steps=1000)
    assert sorted(cluster.order_of_ends()) == [1, 2, 3]
    assert cluster.loads == ["a", "b", "a"], "another one had the slot between its turns"
    for sequence in cluster.sequences.values():
        assert sequence.output_token_ids == expected_output(sequence)


def test_an_adapter_that_cannot_be_loaded_ends_only_its_sequences() -> None:
    cluster = AdapterCluster(1, load_steps=2)
    cluster.failing = {"a"}
    for seq_id, adapter in enumerate((ADAPTERS[0], None, ADAPTERS[1], ADAPTERS[0]), start=1):
        cluster.add(seq_id, adapter)
    for _ in range(10):
        cluster.step()
    failed = [each for each in cluster.outputs if each.finish_reason is FinishReason.ERROR]
    assert [(each.sequence.seq_id, str(each.error)) for each in failed] == [(1, "damaged"), (4, "damaged")]
    cluster.outputs = [each for each in cluster.outputs if each.finish_reason is not FinishReason.ERROR]
    cluster.run_until_idle()
    assert sorted(cluster.order_of_ends()) == [2, 3]


def test_an_adapter_with_the_same_tensors_in_another_directory_is_loaded_from_there() -> None:
    """Two tenants may have the same adapter. The files of one may be damaged, which must not concern the other."""
    cluster = AdapterCluster(1, load_steps=2)
    cluster.failing = {"theirs"}
    theirs, ours = Adapter("theirs", "a" * 64, "/theirs"), Adapter("ours", "a" * 64, "/ours")
    for seq_id, adapter in enumerate((theirs, ours, theirs, ours), start=1):
        cluster.add(seq_id, adapter)
    for _ in range(20):
        cluster.step()
    failed = [each.sequence.seq_id for each in cluster.outputs if each.finish_reason is FinishReason.ERROR]
    assert failed == [1, 3] and cluster.loads == ["theirs", "ours"]
    cluster.outputs = [each for each in cluster.outputs if each.finish_reason is not FinishReason.ERROR]
    cluster.run_until_idle()
    assert sorted(cluster.order_of_ends()) == [2, 4]


def test_without_slots_a_sequence_with_an_adapter_is_refused() -> None:
    cluster = AdapterCluster(0)
    with pytest.raises(InvalidRequest, match=r"'a' cannot be used: dense\.max_loras is 0"):
        cluster.add(1, ADAPTERS[0])
    assert cluster.scheduler.num_waiting == 0


def test_parked_sequences_count_as_waiting_and_can_expire() -> None:
    cluster = AdapterCluster(1, load_steps=1000)
    sequence = cluster.add(1, ADAPTERS[0])
    sequence.queue_timeout_s = 1.0
    cluster.step()
    assert cluster.scheduler.num_waiting == 1
    [expired] = cluster.scheduler.expire(sequence.arrival_s + 10**9)
    assert expired.sequence is sequence and cluster.scheduler.num_waiting == 0


def test_a_sequence_cancelled_while_it_is_opened_gives_its_slot_back_when_the_attention_worker_dies() -> None:
    cluster = AdapterCluster(1)
    sequence = cluster.add(1, ADAPTERS[0])
    for _ in range(3):
        cluster.step(answer_opens=False)
    assert sequence.status is SequenceStatus.OPENING and slot_of(sequence) == 0
    cluster.scheduler.cancel(1)
    cluster.attach_again()
    assert slot_of(sequence) is None
    cluster.add(2, ADAPTERS[1])
    cluster.run_until_idle()
    assert cluster.order_of_ends() == [2]
