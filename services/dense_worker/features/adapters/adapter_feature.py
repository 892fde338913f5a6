"""`AdapterFeature`: sequences whose tokens an adapter (LoRA) computes together with the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from services.common.errors import InvalidRequest, TwostrokeError
from services.dense_worker.features.adapters.adapter_slots import AdapterKey, AdapterSlots
from services.dense_worker.features.feature import Event, Feature
from services.dense_worker.features.sequence_feature import SequenceFeature
from services.dense_worker.features.step_part import FeatureRows, StepPart, StepView
from services.lora.adapter import Adapter

if TYPE_CHECKING:
    from services.dense_worker.engine.sequence import Sequence
    from services.dense_worker.engine.waiting_queue import WaitingQueue
    from services.dense_worker.kernels.lora.tensors import LoraStore
    from services.dense_worker.ranks.leading_backend import LeadingRanks
    from services.pb import dense_pb2
    from services.step import SequenceSpec

_NO_SLOT = -1  # of a row without an adapter


class Loader(Protocol):
    """Loads adapters into slots; see `AdapterLoader`."""

    def load(self, slot: int, adapter: Adapter, on_done: Callable[[int, TwostrokeError | None], None]) -> None: ...
    def use_ranks(self, ranks: LeadingRanks) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class AdapterRows(StepPart):
    """The slot of each row of a step: int64 [num_tokens]."""

    row_slots: np.ndarray


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


class AdapterFeature(Feature):
    """Has `num_slots` slots; 0: adapters are off, and no sequence can have one."""

    name = "adapter"
    sequence_type = SequenceAdapter

    def __init__(self, num_slots: int, loader: Loader | None, store: LoraStore | None = None) -> None:
        """loader: None without slots; store: the adapters of the backend, None: no step runs"""
        self.slots = AdapterSlots(num_slots, self._load)
        self.has_kernels = store is not None
        self._loader, self._store = loader, store
        self._post: Callable[[Event], None] | None = None
        self._num_attachments = 0  # to other ranks

    def start(self, post: Callable[[Event], None]) -> None:
        """Loads can be reported from now on."""
        self._post = post

    def attached(self, ranks: LeadingRanks | None) -> None:
        """Loads all adapters again: other ranks may have been started again since. It is quick where they are."""
        if ranks is not None and self._loader is not None:
            self._num_attachments += 1
            self._loader.use_ranks(ranks)
            self.slots.load_again()

    def close(self) -> None:
        """Ends the loader's thread."""
        if self._loader is not None:
            self._loader.close()

    def admit(self, spec: SequenceSpec, submit: dense_pb2.Submit, stream: int) -> SequenceAdapter:
        """The adapter that the spec names. Raises `InvalidRequest` if adapters are off."""
        assert spec.adapter is not None, "it asks for one"
        if not self.slots.num_slots:
            raise InvalidRequest(f"adapter {spec.adapter.name!r} cannot be used: dense.max_loras is 0", "model")
        return SequenceAdapter(spec.adapter, self.slots)

    def provide(self, waiting: WaitingQueue, oldest_step_id: int | None) -> Iterable[Sequence]:
        """Gives slots to the adapters of parked sequences; see `AdapterSlots.assign`."""
        return self.slots.assign(waiting, oldest_step_id)

    def prepare_step(self, step: StepView, rows: FeatureRows) -> AdapterRows:
        """The slots of the step's rows."""
        slots = np.full(len(step.entries), _NO_SLOT, np.int64)
        slots[rows.indexes] = [each.slot for each in rows.features]
        return AdapterRows(np.repeat(slots, step.entries.num_tokens))

    def begin_step(self, part: AdapterRows | None, num_rows: int) -> None:
        """Tells the backend's adapters the slots of the step's rows, padding included, or that none has one."""
        assert self._store is not None, "the feature has kernels"
        if part is None:
            self._store.begin_step(None)
            return
        row_slots = np.full(num_rows, _NO_SLOT, np.int64)
        row_slots[: len(part.row_slots)] = part.row_slots
        self._store.begin_step(row_slots)

    def activated(self, is_active: bool) -> AbstractContextManager[None]:
        """A context in which steps add the deltas of adapters, or do not."""
        assert self._store is not None, "the feature has kernels"
        return self._store.activated(is_active)

    def _load(self, slot: int, adapter: Adapter) -> None:
        assert self._loader is not None, "slots come with a loader"
        self._loader.load(slot, adapter, partial(self._on_loaded, self._num_attachments))

    def _on_loaded(self, attachment: int, slot: int, error: TwostrokeError | None) -> None:
        """Called on the loader's thread."""
        assert self._post is not None, "the engine exists when a sequence waits for an adapter"
        self._post(partial(self._note_loaded, attachment, slot, error))

    def _note_loaded(
        self, attachment: int, slot: int, error: TwostrokeError | None, waiting: WaitingQueue
    ) -> Iterable[tuple[Sequence, TwostrokeError]]:
        """With another attachment since then the slot is being loaded again."""
        return self.slots.loaded(slot, error, waiting) if attachment == self._num_attachments else ()
