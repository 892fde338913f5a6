"""`AdapterLoader`: loads adapters from their directories into slots, on a thread of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog
import torch

from services.common.errors import RequestAborted, TwostrokeError
from services.dense_worker.kernels.lora.tensors import LoraStore
from services.lora.adapter import Adapter
from services.lora.checkpoint import Shapes, adapter_hash, read_adapter

log = structlog.get_logger()


class AdapterLoader:
    """Loads one adapter after the other. `close` ends the thread after the one that is being loaded."""

    def __init__(self, store: LoraStore, shapes: Shapes, max_rank: int) -> None:
        self._store = store
        self._shapes = shapes
        self._max_rank = max_rank
        # Its own products and copies must not take the cores of a step.
        self._thread = ThreadPoolExecutor(1, "adapters", initializer=torch.set_num_threads, initargs=(1,))

    def load(self, slot: int, adapter: Adapter, on_done: Callable[[int, TwostrokeError | None], None]) -> None:
        """Begins to load an adapter into a slot that no step uses. `on_done` is called on the loader's thread."""
        self._thread.submit(self._load, slot, adapter, on_done)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _load(self, slot: int, adapter: Adapter, on_done: Callable[[int, TwostrokeError | None], None]) -> None:
        start_s, error = time.monotonic(), None
        try:
            self._read(slot, adapter)
            log.info("adapter loaded", adapter=adapter.name, slot=slot, seconds=round(time.monotonic() - start_s, 3))
        except Exception as caught:  # whatever its files do, it concerns only the sequences with this adapter
            if not isinstance(caught, TwostrokeError):
                log.exception("loading an adapter failed unexpectedly", adapter=adapter.name)
            log.warning("an adapter cannot be loaded", adapter=adapter.name, reason=str(caught))
            error = RequestAborted(f"adapter {adapter.name!r} cannot be loaded: {caught}")
        on_done(slot, error)

    def _read(self, slot: int, adapter: Adapter) -> None:
        tensors = read_adapter(Path(adapter.path), self._shapes, self._max_rank)
        found = adapter_hash(tensors.items())
        if found != adapter.hash:
            raise RequestAborted("its files have changed since the gateway loaded it; load it again")
        self._store.store(slot, tensors)
