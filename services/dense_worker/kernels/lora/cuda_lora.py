"""`CudaLora`: adapters in slots of fixed memory on a GPU, and the slot of each row, for captured steps.

Every slot has room for the largest rank in all linear layers, so loading an adapter allocates nothing on the GPU and
changes no address.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.kernels.linear.plain_gemv import can_stream_plain
from services.dense_worker.kernels.linear.rows_product import RowsProduct
from services.dense_worker.kernels.linear.triton_tiles import MAX_ROWS
from services.dense_worker.kernels.lora.tensors import to_tensor
from services.dense_worker.kernels.lora.triton_fused import MAX_RANKS, FusedWorkspace, fused_linear
from services.dense_worker.kernels.lora.triton_fused_hopper import SlotMemory
from services.dense_worker.kernels.lora.triton_lora import (
    FEW_ROWS,
    FEW_ROWS_SPLITS,
    RANK_STEP,
    Blocks,
    block_rows_for,
    expand,
    num_splits_for,
    plan_blocks,
    shrink,
)
from services.dense_worker.kernels.norm.norm import SplitNorm
from services.dense_worker.kernels.triton_launch import KernelLauncher
from services.lora.checkpoint import LoraTensors

_NUM_STAGES = 3  # pinned buffers, used in turn: one is being filled, up to two may have pending copies


@dataclass(frozen=True, slots=True)
class _Layer:
    """The memory of all slots for one linear layer."""

    linear: Linear
    a: torch.Tensor  # [num_projections, max_rank / RANK_STEP, num_slots, RANK_STEP, in_features]
    b: torch.Tensor  # [out_features, max_rank / RANK_STEP, num_slots, RANK_STEP]
    ranks: torch.Tensor  # int32 [num_slots, num_projections], multiples of RANK_STEP; 0: no delta
    column_starts: torch.Tensor  # int32 [num_projections + 1]
    first_features: tuple[int, ...]  # the same without the last
    widest: int  # most columns of a projection


class CudaLora:
    """A LoraStore. All but `store` is called on the engine thread, with the steps' stream as the current one."""

    def __init__(
        self,
        linears: Iterable[Linear],
        num_slots: int,
        max_rank: int,
        max_num_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_deterministic: bool = False,
    ) -> None:
        """`is_deterministic`: the order of additions does not depend on the number of rows, nor do the tiles."""
        self._is_deterministic = is_deterministic
        self.is_active = False  # whether a row of the step has an adapter; set before a capture, too
        self.row_slots: np.ndarray | None = None
        self._dtype, self._device, self._num_slots = dtype, device, num_slots
        self._max_rank = -(-max_rank // RANK_STEP) * RANK_STEP
        self._layers = {linear.merged_from[0].name: self._allocate(linear) for linear in linears}
        self._launcher = KernelLauncher(device)
        self._rows_product = RowsProduct(self._launcher, device, has_deltas=True)
        is_cuda = device.type == "cuda"  # the interpreter runs the same on a CPU
        self._copies = torch.cuda.Stream(device) if is_cuda else None
        self._row_slots = torch.full((max_num_tokens,), -1, dtype=torch.int32, device=device)
        self._stages = [torch.empty(max_num_tokens, dtype=torch.int32, pin_memory=is_cuda) for _ in range(_NUM_STAGES)]
        self._num_steps = 0
        num_projections = max(layer.a.shape[0] for layer in self._layers.values())
        few_rows = max_num_tokens if is_deterministic else min(FEW_ROWS, max_num_tokens)
        num_partial_rows = max(FEW_ROWS_SPLITS * few_rows, max_num_tokens)
        self._hidden = torch.empty(
            num_partial_rows * num_projections * self._max_rank, dtype=torch.float32, device=device
        )
        self._workspace = FusedWorkspace([layer.a for layer in self._layers.values()], self._launcher.num_sms)
        self._num_fused = 0  # products of the step that `multiply` has computed
        self._slots = self._row_slots[:0]  # of the rows of later products
        self._blocks: Blocks | None = None  # of the same rows; None: no layer needs them

    def store(self, slot: int, tensors: Mapping[str, LoraTensors]) -> None:
        """Fills a slot that no step uses; waits for the copies. Raises `InvalidRequest` for an overflow."""
        with torch.cuda.stream(self._copies):
            for layer in self._layers.values():
                a, b, ranks = self._fill(layer, tensors)
                layer.a[:, :, slot].copy_(a.view(layer.a[:, :, slot].shape))
                layer.b[:, :, slot].copy_(b.view(layer.b[:, :, slot].shape))
                layer.ranks[slot].copy_(ranks)
        if self._copies is not None:
            self._copies.synchronize()

    def begin_step(self, row_slots: np.ndarray | None) -> None:
        """Copies the slot of each row to where captured steps read it."""
        self.is_active, self.row_slots = row_slots is not None, row_slots
        if row_slots is not None:
            stage = self._stages[self._num_steps % _NUM_STAGES][: len(row_slots)]
            self._num_steps += 1
            stage.copy_(torch.from_numpy(row_slots))
            self._row_slots[: len(row_slots)].copy_(stage, non_blocking=True)

    @contextmanager
    def activated(self, is_active: bool = True) -> Iterator[None]:
        """A context for warming up and capturing: steps in which rows have adapters, or steps in which none has one."""
        was_active, self.is_active = self.is_active, is_active
        try:
            yield
        finally:
            self.is_active = was_active

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """A context in which steps with adapters only compile the kernels of adapters."""
        with self.activated(), self._launcher.compiling():
            yield

    def start(self, num_rows: int) -> None:
        """Begins a step. Its products are of all its rows, padding included, until `select`."""
        self._workspace.num_shrunk.zero_()
        self._num_fused = 0
        self._set_slots(self._row_slots[:num_rows])

    def select(self, rows: torch.Tensor) -> None:
        """Later products of the step are of these rows."""
        self._set_slots(self._row_slots.index_select(0, rows))

    def fuses(self, linear: Linear, num_rows: int) -> bool:
        """Whether `multiply` computes the whole product of a layer; if not, `add` adds the deltas."""
        is_known = linear.merged_from[0].name in self._layers and not self._is_deterministic
        are_few = num_rows <= MAX_ROWS and self._num_slots * self._max_rank <= MAX_RANKS
        return is_known and are_few and can_stream_plain(self._launcher, linear)

    def multiply(
        self,
        linear: Linear,
        x: torch.Tensor,  # [n, in_features], n <= MAX_ROWS, 16 bits, rows contiguous
        out: torch.Tensor,
        activation: MlpActivation | None,
        residual: torch.Tensor | None,
        norm: SplitNorm | None = None,
        norm_after: SplitNorm | None = None,
    ) -> None:
        """Enqueues the product and the deltas in one kernel; arguments as in `fused_linear`."""
        layer = self._layers[linear.merged_from[0].name]
        assert len(self._slots) == len(x), "`start` or `select` comes first"
        if self._num_fused == len(self._workspace.num_shrunk):  # layers multiply again, for further rows of the step
            self._workspace.num_shrunk.zero_()
            self._num_fused = 0
        fused_linear(
            self._launcher,
            x,
            linear.weight.matrix.data,
            linear.bias_data,
            out,
            SlotMemory(layer.a, layer.b, layer.ranks, layer.column_starts, layer.first_features),
            self._slots,
            self._workspace,
            self._num_fused,
            self._rows_product,
            activation=activation,
            residual=residual,
            norm=norm,
            norm_after=norm_after,
        )
        self._num_fused += 1

    def add(self, linear: Linear, x: torch.Tensor, out: torch.Tensor) -> None:
        """Enqueues both products; a linear layer that adapters do not change is left alone."""
        layer = self._layers.get(linear.merged_from[0].name)
        if layer is None:
            return
        assert self._blocks is not None and len(self._slots) == len(x), "`start` or `select` comes first"
        num_projections = len(layer.a)
        num_splits = FEW_ROWS_SPLITS if self._is_deterministic else num_splits_for(len(x))
        shape = (num_splits, len(x), num_projections, self._max_rank)
        hidden = self._hidden[: int(np.prod(shape))].view(shape)
        shrink(self._launcher, x, layer.a, layer.ranks, self._blocks, hidden)
        expand(self._launcher, hidden, layer.b, layer.ranks, layer.column_starts, layer.widest, self._blocks, out)

    def _set_slots(self, slots: torch.Tensor) -> None:
        self._slots = slots
        is_all_fused = all(self.fuses(layer.linear, len(slots)) for layer in self._layers.values())
        block_rows = block_rows_for(1 if self._is_deterministic else len(slots))
        self._blocks = None if is_all_fused else plan_blocks(slots, self._num_slots, block_rows)

    def _allocate(self, linear: Linear) -> _Layer:
        sizes = [projection.out_features for projection in linear.merged_from]
        starts = [0, *itertools.accumulate(sizes)]
        kind = {"dtype": self._dtype, "device": self._device}
        ranks = self._max_rank // RANK_STEP, self._num_slots, RANK_STEP
        return _Layer(
            linear,
            torch.zeros(len(sizes), *ranks, linear.in_features, **kind),
            torch.zeros(linear.out_features, *ranks, **kind),
            torch.zeros(self._num_slots, len(sizes), dtype=torch.int32, device=self._device),
            torch.tensor(starts, dtype=torch.int32, device=self._device),
            tuple(starts[:-1]),
            max(sizes),
        )

    def _fill(
        self, layer: _Layer, tensors: Mapping[str, LoraTensors]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """An adapter's tensors as a slot holds them, on the host."""
        a = torch.zeros(len(layer.a), self._max_rank, layer.linear.in_features, dtype=self._dtype)
        b = torch.zeros(len(layer.b), self._max_rank, dtype=self._dtype)
        ranks = torch.zeros(layer.ranks.shape[1], dtype=torch.int32)
        column = 0
        for index, projection in enumerate(layer.linear.merged_from):
            found = tensors.get(projection.name)
            if found is not None:
                rank = len(found.a)
                a[index, :rank] = to_tensor(found.a, 1.0, self._dtype, a.device)
                b[column : column + projection.out_features, :rank] = to_tensor(
                    found.b, found.scale, self._dtype, b.device
                )
                ranks[index] = -(-rank // RANK_STEP) * RANK_STEP
            column += projection.out_features
        return a, b, ranks
