"""`AdapterLoader`: loads adapters from their directories into slots, on a thread of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch

from services.common.config import Config
from services.common.errors import RequestAborted, TwostrokeError
from services.common.model_config import load_model_config
from services.common.rank import Rank
from services.common.resolve import ResolvedModel
from services.dense_worker.kernels.linear.linear import Cut, Linear
from services.dense_worker.kernels.lora.tensors import LoraStore
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.parameters import parts_of_type
from services.lora.adapter import Adapter
from services.lora.checkpoint import LoraTensors, Shapes, adapter_hash, read_adapter
from services.lora.shapes import adapted_shapes

if TYPE_CHECKING:
    from services.dense_worker.ranks.leading_backend import LeadingRanks

log = structlog.get_logger()

TakePart = Callable[[Mapping[str, LoraTensors]], Mapping[str, LoraTensors]]


def make_loader(config: Config, model: ResolvedModel, weights: ModelWeights, store: LoraStore) -> AdapterLoader:
    """The loader of a rank's part of adapters into `store`. Raises `ConfigError` for a family without adapters."""
    shapes = adapted_shapes(load_model_config(config.model.path))  # of all layers, also of those not run
    linears = tuple(parts_of_type(Linear, weights.layers))

    def take_part(whole: Mapping[str, LoraTensors]) -> Mapping[str, LoraTensors]:
        return adapter_part(whole, linears, model.config.head_dim, model.rank)

    return AdapterLoader(store, shapes, config.dense.max_lora_rank, take_part)


class AdapterLoader:
    """Loads one adapter after the other. `close` ends the thread after the one that is being loaded."""

    def __init__(self, store: LoraStore, shapes: Shapes, max_rank: int, take_part: TakePart) -> None:
        """`take_part`: what this process computes of an adapter"""
        self._store = store
        self._shapes = shapes
        self._max_rank = max_rank
        self._take_part = take_part
        self._held: dict[int, str] = {}  # hashes, by slot
        self._ranks: LeadingRanks | None = None  # None: this process has all of each adapter
        # Its own products and copies must not take the cores of a step.
        self._thread = ThreadPoolExecutor(1, "adapters", initializer=torch.set_num_threads, initargs=(1,))

    def use_ranks(self, ranks: LeadingRanks) -> None:
        """Adapters are loaded by these ranks, too, from now on."""
        self._ranks = ranks

    def load(self, slot: int, adapter: Adapter, on_done: Callable[[int, TwostrokeError | None], None]) -> None:
        """Begins to load an adapter into a slot that no step uses. `on_done` is called on the loader's thread.

        It is not called if the attachment to other ranks ends before they have loaded it.
        """
        self._thread.submit(self._load, slot, adapter, self._ranks, on_done)

    def load_part(self, slot: int, adapter: Adapter) -> Future[None]:
        """Begins to load this process' part of an adapter. The future has the error why it cannot be loaded."""
        return self._thread.submit(self._read, slot, adapter)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _load(
        self,
        slot: int,
        adapter: Adapter,
        ranks: LeadingRanks | None,
        on_done: Callable[[int, TwostrokeError | None], None],
    ) -> None:
        start_s, error = time.monotonic(), None
        try:
            others = None if ranks is None else ranks.load_adapter(slot, adapter)
            self._read(slot, adapter)
            if others is not None:
                others.result()
            log.info("adapter loaded", adapter=adapter.name, slot=slot, seconds=round(time.monotonic() - start_s, 3))
        except CancelledError:
            return  # the attachment has ended: all is loaded again with the next one
        except Exception as caught:  # whatever its files do, it concerns only the sequences with this adapter
            if not isinstance(caught, TwostrokeError):
                log.exception("loading an adapter failed unexpectedly", adapter=adapter.name)
            log.warning("an adapter cannot be loaded", adapter=adapter.name, reason=str(caught))
            error = RequestAborted(f"adapter {adapter.name!r} cannot be loaded: {caught}")
        on_done(slot, error)

    def _read(self, slot: int, adapter: Adapter) -> None:
        if self._held.pop(slot, None) != adapter.hash:
            tensors = read_adapter(Path(adapter.path), self._shapes, self._max_rank)
            found = adapter_hash(tensors.items())
            if found != adapter.hash:
                raise RequestAborted("its files have changed since the gateway loaded it; load it again")
            self._store.store(slot, self._take_part(tensors))
        self._held[slot] = adapter.hash


def adapter_part(
    tensors: Mapping[str, LoraTensors], linears: Iterable[Linear], head_dim: int, rank: Rank
) -> dict[str, LoraTensors]:
    """The rank's part of the whole `tensors`, for its own `linears`; views.

    Where ranks have columns of a product, B has their rows and A is whole. Where their products are added up, A has
    their columns and B is whole: so are the deltas, since scale * B A x is the sum of scale * B A_r x_r.
    """
    parts = {}
    for linear in linears:
        for projection in linear.merged_from:
            if (found := tensors.get(projection.name)) is None:
                continue
            if linear.cut is Cut.IN:
                own = rank.share(found.a.shape[1])
                part = LoraTensors(found.a[:, own.start : own.stop], found.b, found.scale)
            else:
                own = rank.share(len(found.b), head_dim if linear.name == "qkv" else 1)
                part = LoraTensors(found.a, found.b[own.start : own.stop], found.scale)
            parts[projection.name] = part
    return parts
