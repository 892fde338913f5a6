"""`SequenceAdapter`: the adapter that computes a sequence's tokens."""

from __future__ import annotations

import copy

from services.dense_worker.features.adapters.adapter_slots import AdapterKey, AdapterSlots
from services.dense_worker.features.sequence_feature import SequenceFeature
from services.lora.adapter import Adapter


class SequenceAdapter(SequenceFeature):
    """Keeps its adapter in a slot while the sequence is in the KV cache."""

    def __init__(self, adapter: Adapter, slots: AdapterSlots) -> None:
        self.adapter = adapter
        self.resource = AdapterKey(adapter.hash)
        self.slot: int | None = None  # where its adapter is; None while the sequence is not in the cache
        self._slots = slots

    @property
    def is_ready(self) -> bool:
        """Whether its adapter has a slot."""
        return self._slots.is_ready(self.adapter)

    def enter(self) -> None:
        """Keeps the adapter in its slot."""
        self.slot = self._slots.pin(self.adapter)

    def leave(self, last_step_id: int) -> None:
        """The slot may be given to another adapter, when these steps have ended."""
        assert self.slot is not None, "it has entered"
        self._slots.unpin(self.slot, last_step_id)
        self.slot = None

    def at_opening(self) -> SequenceAdapter:
        """With the slot of now: steps under way read it when the sequence has left."""
        return copy.copy(self)
