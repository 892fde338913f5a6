"""`AdapterSlots`: which adapters are in memory. Plain Python, no torch; engine thread.

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
from typing import TYPE_CHECKING, NamedTuple

from services.common.errors import TwostrokeError
from services.lora.adapter import Adapter

if TYPE_CHECKING:
    from services.dense_worker.engine.sequence import Sequence
    from services.dense_worker.engine.waiting_queue import WaitingQueue


class AdapterKey(NamedTuple):
    """What sequences with the same adapter's tensors wait for together."""

    hash: str


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
    """`load` must not block; `loaded` is called when it is done."""

    def __init__(self, num_slots: int, load: LoadAdapter) -> None:
        self._slots = [_Slot(index) for index in range(num_slots)]
        self._load = load
        self._clock = itertools.count(1)

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def is_ready(self, adapter: Adapter) -> bool:
        """Whether an adapter has a slot that sequences may use."""
        return any(slot.is_ready and _holds(slot, adapter) for slot in self._slots)

    def pin(self, adapter: Adapter) -> int:
        """Keeps an adapter, which is ready, in its slot for a sequence that enters the cache. Returns the slot."""
        slot = next(slot for slot in self._slots if slot.is_ready and _holds(slot, adapter))
        slot.num_users += 1
        slot.last_used = next(self._clock)
        return slot.index

    def unpin(self, index: int, last_step_id: int) -> None:
        """A sequence has left the cache; plans up to `last_step_id` have been made, and may still run it."""
        slot = self._slots[index]
        slot.num_users -= 1
        slot.last_step_id = max(slot.last_step_id, last_step_id)

    def assign(self, waiting: WaitingQueue, oldest_step_id: int | None) -> list[Sequence]:
        """Gives slots to the adapters of parked sequences, in their order; begins to load them.

        oldest_step_id: of the steps under way. Returns the sequences that are newly parked.
        """
        parked: list[Sequence] = []
        first = [sequence for resource, sequence in waiting.missing() if isinstance(resource, AdapterKey)]
        unserved = [each for each in first if self._find(each.spec.adapter) is None]
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
                    waiting.unpark(AdapterKey(slot.adapter.hash))
        return parked

    def loaded(
        self, index: int, error: TwostrokeError | None, waiting: WaitingQueue
    ) -> list[tuple[Sequence, TwostrokeError]]:
        """The adapter of a slot has been loaded; or it could not be, which fails the sequences that wait for it.

        Those whose adapter has the same tensors under another name, or in another directory, go on to wait: it may
        belong to another tenant, whose files may be sound.
        """
        slot = self._slots[index]
        slot.is_loading = False
        assert slot.adapter is not None, "it has been loading one"
        if error is None:
            waiting.unpark(AdapterKey(slot.adapter.hash))
            return []
        adapter, slot.adapter = slot.adapter, None
        waiting_for_it = waiting.all_of(AdapterKey(adapter.hash))
        return [(each, error) for each in waiting_for_it if each.spec.adapter == adapter]

    def load_again(self) -> None:
        """Begins to load what the slots hold. No sequence is in the cache, and all will be parked, or not, anew."""
        for slot in self._slots:
            if slot.adapter is not None:
                slot.is_loading, slot.is_leaving = True, False
                self._load(slot.index, slot.adapter)

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
        self._load(slot.index, adapter)
        return parked

    def _park(self, slot: _Slot, waiting: WaitingQueue) -> list[Sequence]:
        return [] if slot.adapter is None else waiting.park(AdapterKey(slot.adapter.hash))


def _holds(slot: _Slot, adapter: Adapter | None) -> bool:
    return slot.adapter is not None and adapter is not None and slot.adapter.hash == adapter.hash


def _gives_way(slot: _Slot, sequence: Sequence, waiting: WaitingQueue) -> bool:
    """Whether no sequence that waits for the slot's adapter comes before this one."""
    first = waiting.first_of(AdapterKey(slot.adapter.hash))
    return first is None or first.order > sequence.order
