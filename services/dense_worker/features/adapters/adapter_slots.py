"""`AdapterSlots`: which adapters are in memory. Part of the scheduler; plain Python, no torch.

There are `dense.max_loras` slots. A sequence can only be opened while its adapter has a slot; until then it is parked
in the waiting queue and others go on. Adapters are loaded in a thread. A slot is given to another adapter, the least
recently used first, when no sequence in the cache uses it. If all are in use, one is chosen to leave: its waiting
sequences are parked, so that it becomes free when its running ones have ended. No adapter takes a slot whose waiting
sequences come before its own, so none starves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.common.errors import InvalidRequest
from services.lora.adapter import Adapter

if TYPE_CHECKING:
    from services.dense_worker.engine.sequence import Sequence
    from services.dense_worker.engine.waiting_queue import WaitingQueue

LoadAdapter = Callable[[int, Adapter], None]  # loads an adapter into a slot, in a thread


@dataclass(slots=True, eq=False)
class _Slot:
    index: int
    adapter: Adapter | None = None  # that it holds or, while it is being loaded, will hold
    is_loading: bool = False
    is_leaving: bool = False  # gets no more sequences, because another adapter needs the slot
    num_users: int = 0  # sequences in the cache, or being opened
    last_used: int = 0  # higher numbers are later
    last_step_id: int = 0  # steps up to this one may still read it

    @property
    def is_ready(self) -> bool:
        return self.adapter is not None and not self.is_loading and not self.is_leaving


class AdapterSlots:
    """Used on the engine thread. `load` must not block; `loaded` is called when it is done."""

    def __init__(self, num_slots: int = 0, load: LoadAdapter | None = None) -> None:
        self._slots = [_Slot(index) for index in range(num_slots)]
        self._load = load
        self._clock = itertools.count(1)

    def check(self, sequence: Sequence) -> None:
        """Raises `InvalidRequest` for a sequence with an adapter if there are no slots."""
        adapter = sequence.spec.adapter
        if adapter is not None and not self._slots:
            raise InvalidRequest(f"adapter {adapter.name!r} cannot be used: dense.max_loras is 0", "model")

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether a sequence needs no adapter, or its adapter has a slot."""
        adapter = sequence.spec.adapter
        return adapter is None or any(slot.is_ready and _holds(slot, adapter) for slot in self._slots)

    def pin(self, sequence: Sequence) -> None:
        """Keeps the adapter of a sequence, which is ready, in its slot while the sequence is in the cache."""
        if sequence.spec.adapter is not None:
            slot = next(slot for slot in self._slots if slot.is_ready and _holds(slot, sequence.spec.adapter))
            slot.num_users += 1
            slot.last_used = next(self._clock)
            sequence.adapter_slot = slot.index

    def unpin(self, sequence: Sequence, last_step_id: int) -> None:
        """The sequence has left the cache; plans up to `last_step_id` have been made, and may still run it."""
        if sequence.adapter_slot is not None:
            slot = self._slots[sequence.adapter_slot]
            slot.num_users -= 1
            slot.last_step_id = max(slot.last_step_id, last_step_id)
            sequence.adapter_slot = None

    def assign(self, waiting: WaitingQueue, oldest_step_id: int | None) -> list[Sequence]:
        """Gives slots to the adapters of parked sequences, in their order; begins to load them.

        oldest_step_id: of the steps under way. Returns the sequences that are newly parked.
        """
        parked: list[Sequence] = []
        unserved = [each for each in waiting.parked() if self._find(each.spec.adapter) is None]
        while unserved:
            slot = self._choose(unserved[0], waiting, oldest_step_id)
            if slot is None:
                break
            parked += self._replace(slot, unserved.pop(0).spec.adapter, waiting)
        leaving = [slot for slot in self._slots if slot.is_leaving]
        for sequence in unserved[len(leaving) :]:
            candidates = [slot for slot in self._slots if slot.is_ready and _gives_way(slot, sequence, waiting)]
            if candidates:
                slot = min(candidates, key=lambda each: each.last_used)
                slot.is_leaving = True
                parked += self._park(slot, waiting)
        if not unserved:
            for slot in leaving:
                if slot.is_leaving:
                    slot.is_leaving = False
                    waiting.unpark(slot.adapter.hash)
        return parked

    def loaded(self, index: int, waiting: WaitingQueue) -> None:
        """The adapter of a slot has been loaded."""
        slot = self._slots[index]
        slot.is_loading = False
        waiting.unpark(slot.adapter.hash)

    def failed(self, index: int) -> Adapter:
        """The adapter of a slot, which could not be loaded; the slot is free."""
        slot = self._slots[index]
        adapter, slot.adapter, slot.is_loading = slot.adapter, None, False
        return adapter

    def _find(self, adapter: Adapter | None) -> _Slot | None:
        return next((slot for slot in self._slots if _holds(slot, adapter)), None)

    def _choose(self, sequence: Sequence, waiting: WaitingQueue, oldest_step_id: int | None) -> _Slot | None:
        """A slot that can be filled now: an empty one, one whose adapter leaves, or the least recently used."""
        free = [
            slot
            for slot in self._slots
            if not slot.is_loading
            and not slot.num_users
            and (oldest_step_id is None or slot.last_step_id < oldest_step_id)
            and (slot.adapter is None or slot.is_leaving or _gives_way(slot, sequence, waiting))
        ]
        return min(free, key=lambda slot: (slot.adapter is not None, not slot.is_leaving, slot.last_used), default=None)

    def _replace(self, slot: _Slot, adapter: Adapter, waiting: WaitingQueue) -> list[Sequence]:
        parked = self._park(slot, waiting)
        slot.adapter, slot.is_loading, slot.is_leaving = adapter, True, False
        assert self._load is not None, "slots come with a loader"
        self._load(slot.index, adapter)
        return parked

    def _park(self, slot: _Slot, waiting: WaitingQueue) -> list[Sequence]:
        return [] if slot.adapter is None else waiting.park(slot.adapter.hash)


def _holds(slot: _Slot, adapter: Adapter | None) -> bool:
    return slot.adapter is not None and adapter is not None and slot.adapter.hash == adapter.hash


def _gives_way(slot: _Slot, sequence: Sequence, waiting: WaitingQueue) -> bool:
    """Whether no sequence that waits for the slot's adapter comes before this one."""
    first = waiting.first_of(slot.adapter.hash)
    return first is None or first.order > sequence.order
