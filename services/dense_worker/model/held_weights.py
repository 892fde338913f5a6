"""Weights that outlive their worker: the launcher holds their memory, and the next worker maps it."""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import blake2b

import structlog
import torch

from services.common.errors import DeviceError
from services.common.gpu import gpu_uuid
from services.common.lifeline import HeldMemory, Lifeline
from services.common.model_config import ModelConfig
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.weight_memory import Empty, WeightLayout, WeightMemory
from services.dense_worker.model.weights import empty_weights

log = structlog.get_logger()


class HeldWeights:
    """The weights of one model on one device, whose memory the launcher holds, or will hold."""

    def __init__(
        self, lifeline: Lifeline, digest: str, config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`digest`: of the weights, see `weights_hash`."""
        self._lifeline = lifeline
        self._config, self._dtype, self._device = config, dtype, device
        layout = WeightLayout()
        empty_weights(config, dtype, torch.device("meta"), layout.empty)
        self.num_bytes = layout.num_bytes
        identity = f"{digest} {gpu_uuid(device)} {layout.tensors}"
        self.key = blake2b(identity.encode(), digest_size=16).hexdigest()

    def are_held(self) -> bool:
        """Whether the launcher has them now. Raises `PeerError` if it does not answer."""
        held = self._lifeline.ask(self.key)
        if held is not None:
            os.close(held.descriptor)
        return held is not None

    def get(self, load: Callable[[Empty | None], ModelWeights]) -> ModelWeights:
        """The weights: those that are held, or else those that `load` puts into tensors, which are held from then on.

        Raises what `load` raises, `CapacityError` without room, and `PeerError` if the launcher does not answer.
        """
        weights = self._find()
        return self._load(load) if weights is None else weights

    def _find(self) -> ModelWeights | None:
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
        return empty_weights(self._config, self._dtype, self._device, memory.empty)

    def _load(self, load: Callable[[Empty | None], ModelWeights]) -> ModelWeights:
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
