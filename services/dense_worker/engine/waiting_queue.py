"""`WaitingQueue`: the order of sequences, their time limits, and the size of the queue. Part of the scheduler.

    order = arrival_s + priority · priority_ageing_s - max_tokens · head_start_s

The lowest order decides which priority goes first. For every `priority_ageing_s` of waiting, a sequence gains one
priority over newcomers. With a head start those that may take longest begin first, so that fewer steps are left in
which only a few of them run. All sequences age at the same rate, so the order of two sequences never changes and a
sorted list suffices. Only sequences that arrive within `(priority - lowest priority) · priority_ageing_s`, and a head
start, after a sequence can overtake it. With priorities from -100 to 100 and 1 s that is at most 200 s, so no sequence
starves.

The sequences of one priority are divided by tenants, and those of a tenant by clients: first comes the tenant that has
cost the fewest tokens of prompts and outputs, then its client with the fewest, then that client's sequences in order.
Of two clients that both keep waiting, none gets ahead of the other by more than the tokens of one sequence. The bound
on overtaking above holds between priorities, and between the sequences of one client.

A sequence one of whose resources is not in memory is parked: it keeps its order, and nobody's turn waits for it.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator

from services.common.errors import CapacityError, QueueTimeout
from services.common.fairness import Client, may_wait, refusal
from services.dense_worker.engine.fairness.flows import Flow, FlowGroup
from services.dense_worker.engine.sequence import Sequence, SequenceStatus
from services.dense_worker.features.sequence_feature import ResourceKey

TURN_S_PER_TOKEN = 0.05  # by which a sequence that took a turn in the KV cache falls behind: about what a token takes
EXPECTED_OUTPUT_TOKENS = 256  # of a sequence that may get more; the real number is charged when it ends
_MOST_PASSED_BY = 64  # which wait for more than is there; the waiting clients share this number evenly
CHECK_INTERVAL_S = 0.25  # checking 10,000 sequences takes about 1 ms


class WaitingQueue:
    """Waiting sequences in order. The limits count only sequences that never ran: others cannot be refused."""

    def __init__(
        self, max_num_sequences: int, max_num_tokens: int, priority_ageing_s: float, head_start_s: float = 0.0
    ) -> None:
        self._max_num_sequences = max_num_sequences
        self._max_num_tokens = max_num_tokens  # tokens of their prompts
        self._priority_ageing_s = priority_ageing_s
        self._head_start_s = head_start_s  # for each token that a sequence may get
        self._sequences: list[Sequence] = []
        self._of_client = defaultdict[Flow, list[Sequence]](list)  # the same sequences
        self._of_resource: dict[ResourceKey, list[Sequence]] = {}  # those that need one, parked ones included
        self._missing: set[ResourceKey] = set()  # resources whose sequences are parked
        self._parked: set[Sequence] = set()
        self._tenants = defaultdict[int, FlowGroup](FlowGroup)  # of live sequences, by priority
        self._num_live = Counter[Client]()  # live sequences, by client
        self._num_new = 0  # number of waiting sequences that never ran
        self._num_new_tokens = 0  # tokens of the prompts of these
        self._num_new_of = Counter[Client]()  # the same two numbers, by client
        self._num_new_tokens_of = Counter[Client]()
        self._next_check_s = 0.0  # next check for expired sequences, on the monotonic clock
        self._numbers = itertools.count()  # arrival numbers, so that no two sequences compare equal

    def __len__(self) -> int:
        return len(self._sequences) + len(self._parked)

    def __iter__(self) -> Iterator[Sequence]:
        """All of them, in no particular order."""
        return itertools.chain(self._sequences, self._parked)

    def in_order(self) -> Iterator[Sequence]:
        """Those whose resources are in memory, in their order. Nothing may change meanwhile."""
        return iter(self._sequences)

    def parked(self) -> Iterator[Sequence]:
        """Those whose resources are not in memory, in no particular order."""
        return iter(self._parked)

    @property
    def has_parked(self) -> bool:
        return bool(self._parked)

    @property
    def has_several_clients(self) -> bool:
        """Whether the live sequences are of several clients."""
        return len(self._num_live) > 1

    def admit(self, sequence: Sequence) -> None:
        """Sets order and flow of a new sequence. Raises `CapacityError` if the queue is full.

        The limit of tokens does not apply to an otherwise empty queue. The last part of the queue is kept for clients
        that have little in it; sequences without a client may use all of it.
        """
        if not sequence.has_started:
            if self._num_new >= self._max_num_sequences:
                raise CapacityError(f"{self._num_new} sequences are waiting, the limit is {self._max_num_sequences}")
            num_tokens = self._num_new_tokens + sequence.num_prompt_tokens
            if self._num_new and num_tokens > self._max_num_tokens:
                raise CapacityError(
                    f"with this prompt of {sequence.num_prompt_tokens} tokens {num_tokens} would be waiting, "
                    f"the limit is {self._max_num_tokens}"
                )
            if sequence.spec.client:
                self._check_share(sequence)
        sequence.order = self._begin_s(sequence), next(self._numbers)
        tenants = self._tenants[self.class_of(sequence)]
        sequence.flow = tenants.enter_client(sequence.spec.tenant, sequence.spec.client)
        self._num_live[sequence.spec.client_id] += 1

    def order_after_turn(self, sequence: Sequence) -> tuple[float, int]:
        """The order of a sequence that has had turns: behind those that came as early and have fewer tokens."""
        return self._begin_s(sequence) + TURN_S_PER_TOKEN * len(sequence.output_token_ids), sequence.order[1]

    def _begin_s(self, sequence: Sequence) -> float:
        spec = sequence.spec
        return sequence.arrival_s + spec.priority * self._priority_ageing_s - spec.max_tokens * self._head_start_s

    def _check_share(self, sequence: Sequence) -> None:
        """Raises `CapacityError` if a new sequence's client would take the room that is kept for others."""
        client = sequence.spec.client_id
        num_own, num_own_tokens = self._num_new_of[client], self._num_new_tokens_of[client]
        if not may_wait(self._max_num_sequences, self._num_new, num_own, 1):
            raise CapacityError(refusal(f"{num_own} of {self._num_new} waiting sequences", 1, self._max_num_sequences))
        num_tokens = sequence.num_prompt_tokens
        if not may_wait(self._max_num_tokens, self._num_new_tokens, num_own_tokens, num_tokens):
            what = f"{num_own_tokens} of {self._num_new_tokens} waiting prompt tokens"
            raise CapacityError(refusal(what, num_tokens, self._max_num_tokens))

    def forget(self, sequence: Sequence) -> None:
        """Removes an admitted sequence that has ended, which does not wait, from its flow."""
        self._settle(sequence)
        sequence.get_flow().leave()
        client = sequence.spec.client_id
        self._num_live[client] -= 1
        if not self._num_live[client]:
            del self._num_live[client]

    def push(self, sequence: Sequence, missing: Iterable[ResourceKey] = ()) -> None:
        """Adds an admitted sequence, for the first time or again. `missing`: its resources that are not in memory."""
        sequence.status = SequenceStatus.WAITING
        self._settle(sequence)
        self._count(sequence, 1)
        resources = sequence.resources
        for resource in resources:
            insert(self._of_resource.setdefault(resource, []), sequence)
        self._missing.update(missing)
        if not self._missing.isdisjoint(resources):
            self._parked.add(sequence)
        else:
            self._line_up(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence."""
        self._count(sequence, -1)
        for resource in sequence.resources:
            waiting = self._of_resource[resource]
            remove(waiting, sequence)
            if not waiting:
                del self._of_resource[resource]
                self._missing.discard(resource)
        if sequence in self._parked:
            self._parked.remove(sequence)
        else:
            self._step_out(sequence)

    def park(self, resource: ResourceKey) -> list[Sequence]:
        """Takes the sequences that need a resource out of all turns, because it leaves the memory; returns them."""
        if resource in self._missing or resource not in self._of_resource:
            return []
        self._missing.add(resource)
        for sequence in self._of_resource[resource]:
            if sequence not in self._parked:
                self._parked.add(sequence)
                self._step_out(sequence)
        return self._of_resource[resource]

    def unpark(self, resource: ResourceKey) -> None:
        """Gives the sequences that need a resource their turns, because it is in memory."""
        if resource in self._missing:
            self._missing.remove(resource)
            for sequence in self._of_resource[resource]:
                if self._missing.isdisjoint(sequence.resources):
                    self._parked.remove(sequence)
                    self._line_up(sequence)

    def first_of(self, resource: ResourceKey) -> Sequence | None:
        """The first waiting sequence that needs a resource."""
        return next(iter(self._of_resource.get(resource, ())), None)

    def missing(self) -> list[tuple[ResourceKey, Sequence]]:
        """The resources for which sequences are parked, each with the first of these, in their order."""
        found = [(resource, self._of_resource[resource][0]) for resource in self._missing]
        return sorted(found, key=lambda each: each[1].order)

    def all_of(self, resource: ResourceKey) -> list[Sequence]:
        """All waiting sequences that need a resource."""
        return list(self._of_resource.get(resource, ()))

    def class_of(self, sequence: Sequence) -> int:
        """Sequences of the same class share evenly. Without ageing priorities do not matter."""
        return sequence.spec.priority if self._priority_ageing_s else 0

    def _line_up(self, sequence: Sequence) -> None:
        insert(self._sequences, sequence)
        flow = sequence.get_flow()
        insert(self._of_client[flow], sequence)
        flow.set_num_waiting(len(self._of_client[flow]))

    def _step_out(self, sequence: Sequence) -> None:
        remove(self._sequences, sequence)
        flow = sequence.get_flow()
        of_client = self._of_client[flow]
        remove(of_client, sequence)
        if not of_client:
            del self._of_client[flow]
        flow.set_num_waiting(len(of_client))

    def choose(self, sequence: Sequence) -> None:
        """Removes a sequence that is about to be opened, and charges its flow for its tokens.

        That is all it has to compute, and the output that is to be expected. `push` and `forget` correct the second.
        """
        num_outputs = min(sequence.spec.max_tokens - len(sequence.output_token_ids), EXPECTED_OUTPUT_TOKENS)
        sequence.num_paid_outputs = len(sequence.output_token_ids) + num_outputs
        sequence.get_flow().choose(sequence.num_remaining_tokens + sequence.num_rows * num_outputs)
        self.remove(sequence)

    def note_opened(self, sequence: Sequence) -> None:
        """Charges nothing for tokens that the KV cache has already."""
        sequence.get_flow().charge(-sequence.num_computed_tokens)

    def _settle(self, sequence: Sequence) -> None:
        """Charges for the output that there was, in place of the expected one."""
        if sequence.num_paid_outputs:
            num_outputs = len(sequence.output_token_ids) - sequence.num_paid_outputs
            sequence.get_flow().charge(sequence.num_rows * num_outputs)
            sequence.num_paid_outputs = 0

    def heads(
        self, preferred_seq_ids: Collection[int], can_go: Callable[[Sequence], bool] = lambda _: True
    ) -> Iterator[Sequence]:
        """The first sequence of each client, in the order of their turns. The priority whose turn it is counts.

        If preferred sequences wait, only the first of them. Those that `can_go` denies are passed by, up to
        `_MOST_PASSED_BY` of all clients together, besides the first one of each.
        """
        preferred = (each for each in self._sequences if each.seq_id in preferred_seq_ids and can_go(each))
        if preferred_seq_ids and (first := next(preferred, None)) is not None:
            yield first
        elif self._sequences:
            num_of_each = 1 + _MOST_PASSED_BY // len(self._of_client)
            for client in self._tenants[self.class_of(self._sequences[0])].waiting_clients():
                yield from itertools.islice(filter(can_go, self._of_client[client][:num_of_each]), 1)

    def expired(self, now_s: float) -> list[tuple[Sequence, QueueTimeout]]:
        """Sequences that have waited too long, with their errors. Checks only every `CHECK_INTERVAL_S`."""
        if now_s < self._next_check_s:
            return []
        self._next_check_s = now_s + CHECK_INTERVAL_S
        return [
            (sequence, QueueTimeout(f"waited {waited_s:.3f} s for the first step, the limit is {limit_s:g} s"))
            for sequence in self
            if (limit_s := sequence.queue_timeout_s) is not None
            and (waited_s := now_s - sequence.arrival_s) >= limit_s
            and not sequence.has_started
        ]

    def clear(self) -> None:
        """Removes all sequences."""
        for flow in self._of_client:
            flow.set_num_waiting(0)
        self._of_client.clear()
        self._sequences.clear()
        self._of_resource.clear()
        self._missing.clear()
        self._parked.clear()
        self._num_new = self._num_new_tokens = 0
        self._num_new_of.clear()
        self._num_new_tokens_of.clear()

    def _count(self, sequence: Sequence, sign: int) -> None:
        if not sequence.has_started:
            client = sequence.spec.client_id
            self._num_new += sign
            self._num_new_of[client] += sign
            self._num_new_tokens += sign * sequence.num_prompt_tokens
            self._num_new_tokens_of[client] += sign * sequence.num_prompt_tokens
            if not self._num_new_of[client]:
                del self._num_new_of[client], self._num_new_tokens_of[client]


def insert(ordered: list[Sequence], sequence: Sequence) -> None:
    """Inserts a sequence at the position given by its order."""
    bisect.insort(ordered, sequence, key=_order)


def remove(ordered: list[Sequence], sequence: Sequence) -> None:
    """Removes a sequence from an ordered list by binary search."""
    index = bisect.bisect_left(ordered, sequence.order, key=_order)
    assert ordered[index] is sequence
    del ordered[index]


def _order(sequence: Sequence) -> tuple[float, int]:
    return sequence.order
