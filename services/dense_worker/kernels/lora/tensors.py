"""Converts the tensors of adapters' checkpoints, and places them into the model's linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch

from services.common.errors import InvalidRequest
from services.dense_worker.kernels.linear.linear import Linear
from services.lora.checkpoint import LoraTensors


class LoraStore(Protocol):
    """The adapters of a model in slots, on the model's device, for one stream of steps."""

    is_active: bool  # whether a row of the step has an adapter; if not, `select` and `add` are not called
    row_slots: np.ndarray | None  # what `begin_step` was given last

    def store(self, slot: int, tensors: Mapping[str, LoraTensors]) -> None:
        """Fills a slot that no step uses; may wait for the device. Called on the loader's thread."""

    def begin_step(self, row_slots: np.ndarray | None) -> None:
        """Prepares a step: int64 [num_tokens], the slot of each row or -1; None if no row has an adapter."""

    def select(self, rows: torch.Tensor) -> None:
        """Later products of the step are of these rows, int64 [r]."""

    def add(self, linear: Linear, x: torch.Tensor, out: torch.Tensor) -> None:
        """x [n, in_features]; adds to each row of out [n, out_features] the delta of its adapter."""


def to_tensor(values: np.ndarray, scale: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`scale` times the values, rounded once to `dtype`; values in uint16 are the bits of bfloat16.

    Raises `InvalidRequest` if a value is too large for `dtype`.
    """
    if values.dtype == np.uint16:
        tensor = torch.from_numpy(values.view(np.int16).copy()).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(values.copy())
    if scale != 1.0:
        tensor = tensor.float() * scale
    tensor = tensor.to(device, dtype)
    if not bool(tensor.isfinite().all()):
        raise InvalidRequest(f"the adapter has values too large for {dtype}, the greatest is {np.abs(values).max()}")
    return tensor
