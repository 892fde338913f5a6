"""Adapters of a model in memory: a store with slots for them, and what they add to the products of linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

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


class RowDeltas(NamedTuple):
    """The products with B that are added to a linear layer's: those of each row with its adapter's."""

    hidden: torch.Tensor  # x A^T, x's dtype [num_projections, most rows, ranks of all slots, and zeros behind them]
    a: torch.Tensor  # [num_projections, groups of ranks, num_slots, RANK_STEP, in_features]
    b: torch.Tensor  # [weight's rows, ranks of all slots], scaled
    group_size: int  # ranks that lie together: the first ones of all slots, and so on
    num_tiles: int  # of A, RANK_STEP ranks each
    ranks: torch.Tensor  # int32 [num_slots, num_projections], multiples of RANK_STEP; 0: no delta
    column_starts: torch.Tensor  # int32 [num_projections + 1]: the columns of each projection
    first_features: tuple[int, ...]  # the same without the last, on the host
    row_slots: torch.Tensor  # int32 [n]: the slot of each row or -1
    sums: torch.Tensor  # float32: those of `hidden` over parts of in_features
    num_parts_done: torch.Tensor  # int32 [num_tiles], zeros
    counters: torch.Tensor  # int32 [2]: tiles of A whose sums are in `hidden`, and, from 1 on, x is complete
