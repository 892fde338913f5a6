"""`TorchLora`: the adapters' deltas in plain torch, on a CPU: the reference for the kernels on CUDA."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.kernels.lora.tensors import to_tensor
from services.lora.checkpoint import LoraTensors


@dataclass(frozen=True, slots=True)
class _Part:
    """The delta of one of the projections that a linear layer was merged from."""

    columns: slice  # of the product
    ranks: slice  # rows of `_Delta.a`
    b: torch.Tensor  # [columns, rank], scaled


@dataclass(frozen=True, slots=True)
class _Delta:
    """An adapter's delta of one linear layer."""

    a: torch.Tensor  # [sum of ranks, in_features]
    parts: tuple[_Part, ...]


class TorchLora:
    """Adapters in slots, and the slot of each row of a step. A slot may be filled while a step runs without it."""

    def __init__(
        self,
        linears: Iterable[Linear],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        row_by_row: bool = False,
    ) -> None:
        """`row_by_row`: the bits of a row do not depend on how many other rows have its adapter."""
        self._linears = tuple(linears)
        self._dtype, self._device = dtype, device
        self._row_by_row = row_by_row
        self._slots: list[dict[str, _Delta]] = [{} for _ in range(num_slots)]  # by the name of the first projection
        self.is_active = False  # whether a row of the step has an adapter
        self.row_slots: np.ndarray | None = None
        self._row_slots = torch.empty(0, dtype=torch.int64)
        self._groups: list[tuple[int, torch.Tensor]] = []

    def store(self, slot: int, tensors: Mapping[str, LoraTensors]) -> None:
        """Fills a slot that no step uses. Called on the loader's thread. Raises `InvalidRequest` for an overflow."""
        deltas = {}
        for linear in self._linears:
            delta = self._make_delta(linear, tensors)
            if delta is not None:
                deltas[linear.merged_from[0].name] = delta
        self._slots[slot] = deltas

    def begin_step(self, row_slots: np.ndarray | None) -> None:
        """row_slots: int64 [num_tokens], -1 for rows without an adapter; None if no row has one."""
        self.is_active, self.row_slots = row_slots is not None, row_slots
        if row_slots is not None:
            self._row_slots = torch.from_numpy(row_slots)
            self._groups = self._group(self._row_slots)

    def select(self, rows: torch.Tensor) -> None:
        """Later products are of these rows of the step, int64 [r]."""
        self._groups = self._group(self._row_slots[rows])

    def add(self, linear: Linear, x: torch.Tensor, out: torch.Tensor) -> None:
        """x [n, in_features]; adds to each row of out [n, out_features] the delta of its adapter."""
        for slot, rows in self._groups:
            delta = self._slots[slot].get(linear.merged_from[0].name)
            if delta is not None:
                hidden = F.linear(x[rows], delta.a)
                for part in delta.parts:
                    out[:, part.columns].index_add_(0, rows, F.linear(hidden[:, part.ranks], part.b))

    def _group(self, row_slots: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        groups = group_rows(row_slots)
        return [(slot, row) for slot, rows in groups for row in rows.split(1)] if self._row_by_row else groups

    def _make_delta(self, linear: Linear, tensors: Mapping[str, LoraTensors]) -> _Delta | None:
        column = rank = 0
        a: list[torch.Tensor] = []
        parts: list[_Part] = []
        for projection in linear.merged_from:
            found = tensors.get(projection.name)
            if found is not None:
                a.append(to_tensor(found.a, 1.0, self._dtype, self._device))
                columns = slice(column, column + projection.out_features)
                b = to_tensor(found.b, found.scale, self._dtype, self._device)
                parts.append(_Part(columns, slice(rank, rank + len(a[-1])), b))
                rank += len(a[-1])
            column += projection.out_features
        return _Delta(torch.cat(a), tuple(parts)) if parts else None


def group_rows(row_slots: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """The rows of each slot, int64 and ascending; rows of slot -1 have no adapter and are left out."""
    slots: SequenceOf[int] = row_slots.unique().tolist()
    return [(slot, (row_slots == slot).nonzero()[:, 0]) for slot in slots if slot >= 0]
