"""Weights that outlive their worker: the launcher holds their memory, and the next worker maps it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Generic, Protocol, TypeVar

import structlog
import torch

from services.common.errors import DeviceError
from services.common.gpu import gpu_uuid
from services.common.lifeline import HeldMemory, Lifeline
from services.common.rank import ALONE, Rank
from services.dense_worker.model.weight_memory import Empty, WeightLayout, WeightMemory

log = structlog.get_logger()


class HasTensors(Protocol):
    """The weights of a model, or of what drafts for one."""

    def named_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """All tensors, or views of them."""


Weights = TypeVar("Weights", bound=HasTensors)


class HeldWeights(Generic[Weights]):
    """Weights on one device, whose memory the launcher holds, or will hold."""

    def __init__(
        self,
        lifeline: Lifeline,
        digest: str,
        make_empty: Callable[[torch.device, Empty], Weights],
        device: torch.device,
        rank: Rank = ALONE,
    ) -> None:
        """`digest`: of the weights, see `weights_hash`. `make_empty`: makes them of uninitialised tensors.

        It asks for the same tensors, in the same order, as what `get` is given.
        """
        self._lifeline = lifeline
        self._make_empty, self._device = make_empty, device
        layout = WeightLayout()
        make_empty(torch.device("meta"), layout.empty)
        self.num_bytes = layout.num_bytes
        identity = f"{digest} {gpu_uuid(device)} {rank} {layout.tensors}"
        self.key = rank.prefix + blake2b(identity.encode(), digest_size=16).hexdigest()

    def are_held(self) -> bool:
        """Whether the launcher has them now. Raises `PeerError` if it does not answer."""
        held = self._lifeline.ask(self.key)
        if held is not None:
            os.close(held.descriptor)
        return held is not None

    def get(self, load: Callable[[Empty | None], Weights]) -> Weights:
        """The weights: those that are held, or else those that `load` puts into tensors, which are held from then on.

        Raises what `load` raises, `CapacityError` without room, and `PeerError` if the launcher does not answer.
        """
        weights = self._find()
        return self._load(load) if weights is None else weights

    def _find(self) -> Weights | None:
        held = self._lifeline.ask(self.key)
        if held is None:
            return None
        try:
            memory = WeightMemory.map(held.descriptor, held.num_bytes, self._device)
            found = memory.checksum()
        except (DeviceError, RuntimeError) as error:
            log.error("the weights in memory cannot be used and are loaded again", reason=str(error))
            return None
        finally:
            os.close(held.descriptor)
        if found != held.checksum:
            log.error("the weights in memory are damaged and are loaded again", checksum=found, expected=held.checksum)
            return None
        log.info("weights found in memory", bytes=held.num_bytes)
        return self._make_empty(self._device, memory.empty)

    def _load(self, load: Callable[[Empty | None], Weights]) -> Weights:
        try:
            memory, descriptor = WeightMemory.create(self.num_bytes, self._device)
        except DeviceError as error:
            log.warning("the weights will be loaded again if this worker dies", reason=str(error))
            return load(None)
        try:
            weights = load(memory.empty)
            if memory.holds(tensor for _, tensor in weights.named_tensors()):
                self._lifeline.hold(self.key, HeldMemory(descriptor, self.num_bytes, memory.checksum()))
            else:  # the checkpoint has an lm_head that its config.json denies
                log.warning("the weights will be loaded again if this worker dies", reason="their lm_head is untied")
        finally:
            os.close(descriptor)
        return weights
