"""`triton_fused` on Hopper, of weights that `rows_product` does not multiply: a kernel for x A^T, and
`triton_skinny_hopper`, which multiplies it by B.

Both start while the kernel before them still runs, the second beside the first, whose programs need little of an SM.
The second copies its first weights meanwhile. It waits for the first one's signs, not for its end: that the kernel
before has ended, so that x is complete, and, after its own product, for x A^T. It cannot wait in vain, because it is
not started before all programs of the first one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.quantized.triton_codes import TRITON_TYPES
from services.dense_worker.kernels.linear.triton_skinny import SM_BYTES, SkinnyTiles, choose_skinny_tiles
from services.dense_worker.kernels.linear.triton_skinny_hopper import multiply_copied_ahead
from services.dense_worker.kernels.linear.triton_tiles import BLOCK_OUT, MAX_ROWS, SplitWorkspace
from services.dense_worker.kernels.lora.tensors import RowDeltas
from services.dense_worker.kernels.lora.triton_lora import RANK_STEP
from services.dense_worker.kernels.norm.norm import SplitNorm, num_squares
from services.dense_worker.kernels.triton_launch import KernelLauncher

_BLOCK_IN, _MAX_BLOCKS = 128, 8  # of a program for x A^T, which keeps them all in registers
SHRINK_BYTES = 12 << 10  # of an SM's shared memory, for that program
_PAD = 128  # ranks of the largest block that `triton_skinny_hopper` copies


class SlotMemory(NamedTuple):
    """The adapters of one linear layer, by slot."""

    # The first RANK_STEP ranks of all slots lie together, then the next: where all are low, the others are not read.
    a: torch.Tensor  # [num_projections, max_rank / RANK_STEP, num_slots, RANK_STEP, in_features]
    b: torch.Tensor  # [out_features, max_rank / RANK_STEP, num_slots, RANK_STEP], scaled
    ranks: torch.Tensor  # int32 [num_slots, num_projections]; 0: no delta
    column_starts: torch.Tensor  # int32 [num_projections + 1]: the columns of each projection
    first_features: tuple[int, ...]  # the same without the last, on the host


class HiddenWorkspace:
    """x A^T, in device memory."""

    def __init__(self, slots: Sequence[torch.Tensor], num_sms: int) -> None:
        """slots: A of each layer, as in `SlotMemory`."""
        num_projections = max(len(a) for a in slots)
        num_ranks = slots[0][0, ..., 0].numel()
        num_padded = triton.cdiv(num_ranks, _PAD) * _PAD
        self.hidden = slots[0].new_zeros(num_projections, MAX_ROWS, num_padded)
        shapes = [_shrink_grid(a, num_sms) for a in slots]
        num_programs = max(num_tiles * num_splits for num_tiles, num_splits in shapes)
        self.sums = slots[0].new_empty(num_programs * RANK_STEP * MAX_ROWS, dtype=torch.float32)
        self.num_parts_done = slots[0].new_zeros(max(num_tiles for num_tiles, _ in shapes), dtype=torch.int32)


def _shrink_grid(a: torch.Tensor, num_sms: int) -> tuple[int, int]:
    """Tiles of ranks, and parts of in_features: about as many programs as there are SMs, or more."""
    num_tiles, num_blocks = a.shape[:3].numel(), triton.cdiv(a.shape[-1], _BLOCK_IN)
    num_splits = max(1, min(num_sms // num_tiles, num_blocks), triton.cdiv(num_blocks, _MAX_BLOCKS))
    return num_tiles, triton.cdiv(num_blocks, triton.cdiv(num_blocks, num_splits))


def row_deltas(
    slots: SlotMemory,
    row_slots: torch.Tensor,
    workspace: HiddenWorkspace,
    counters: torch.Tensor,  # int32 [2], zero
) -> RowDeltas:
    """What kernels need to add the deltas of a layer."""
    num_projections, num_groups, num_slots, _, _ = slots.a.shape
    return RowDeltas(
        workspace.hidden[:num_projections],
        slots.a,
        slots.b.flatten(1),
        num_slots * RANK_STEP,
        num_projections * num_groups * num_slots,
        slots.ranks,
        slots.column_starts,
        slots.first_features,
        row_slots,
        workspace.sums,
        workspace.num_parts_done,
        counters,
    )


def copied_ahead_linear(
    launcher: KernelLauncher,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    deltas: RowDeltas,
    splits: SplitWorkspace,
    *,
    activation: MlpActivation | None,
    residual: torch.Tensor | None,
    norm: SplitNorm | None,
    norm_after: SplitNorm | None,
) -> None:
    """As `fused_linear`, for the rows and weights that it chooses."""
    num_rows, out_features = out.shape
    is_gated = activation is not None and activation.is_gated
    tiles = choose_tiles_beside(
        num_rows,
        out_features,
        is_gated,
        launcher.num_sms,
        None if norm_after is None else num_squares(out_features),
    )
    _shrink(launcher, x, deltas, tiles.block_rows)
    multiply_copied_ahead(
        launcher,
        x,
        weight,
        bias,
        out,
        splits,
        None,
        residual,
        norm,
        norm_after,
        deltas,
        DTYPE=TRITON_TYPES[x.dtype],
        ACTIVATION=None if activation is None else activation.function.value,
        IS_GATED=is_gated,
        BLOCK_ROWS=tiles.block_rows,
        BLOCK_OUT=BLOCK_OUT,
        BLOCK_IN=tiles.block_in,
        NUM_SPLITS=tiles.num_splits,
        NUM_STAGES=tiles.num_stages,
        HEIGHT=tiles.height,
        num_warps=4,
    )


def _shrink(launcher: KernelLauncher, x: torch.Tensor, deltas: RowDeltas, block_rows: int) -> None:
    """Launches the kernel for x A^T, for at most `block_rows` rows."""
    num_projections, num_groups, num_slots, _, in_features = deltas.a.shape
    num_tiles, num_splits = _shrink_grid(deltas.a, launcher.num_sms)
    launcher(
        _shrink_kernel,
        (num_tiles, num_splits),
        deltas.hidden,
        x,
        deltas.a,
        deltas.ranks,
        deltas.row_slots,
        deltas.sums,
        deltas.num_parts_done,
        deltas.counters,
        len(x),
        x.stride(0),
        in_features,
        NUM_PROJECTIONS=num_projections,
        NUM_SLOTS=num_slots,
        NUM_RANKS=num_groups * num_slots * RANK_STEP,
        RANK_STEP=RANK_STEP,
        HIDDEN_STRIDE=deltas.hidden.stride(1),
        MAX_ROWS=MAX_ROWS,
        BLOCK_ROWS=block_rows,
        BLOCK_IN=_BLOCK_IN,
        NUM_BLOCKS=triton.cdiv(triton.cdiv(in_features, _BLOCK_IN), num_splits),
        NUM_SPLITS=num_splits,
        num_warps=4,
    )


def choose_tiles_beside(
    num_rows: int, out_features: int, is_gated: bool, num_sms: int, most_tiles: int | None
) -> SkinnyTiles:
    """Those of the product alone, where they leave room on an SM for a program that computes x A^T."""
    tiles = choose_skinny_tiles(num_rows, out_features, is_gated, num_sms, is_ahead=True, most_tiles=most_tiles)
    programs_per_sm = 1 if triton.cdiv(out_features, tiles.height) * tiles.num_splits <= num_sms else 2
    tile_bytes = 2 * tiles.block_in * (BLOCK_OUT * (1 + is_gated) + tiles.block_rows)
    return replace(tiles, num_stages=(SM_BYTES - SHRINK_BYTES) // programs_per_sm // tile_bytes)


@triton.jit(do_not_specialize=["num_rows"])
def _shrink_kernel(
    hidden,
    x,
    a,
    ranks,
    row_slots,
    partial_sums,
    num_parts_done,
    counters,
    num_rows,
    x_stride,
    in_features,
    NUM_PROJECTIONS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANK_STEP: tl.constexpr,
    HIDDEN_STRIDE: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes RANK_STEP ranks of a slot over one of NUM_SPLITS parts of in_features, for its rows."""
    if PDL:
        gdc_launch_dependents()
    tile, split = tl.program_id(0), tl.program_id(1)
    projection, place = tile * RANK_STEP // NUM_RANKS, tile * RANK_STEP % NUM_RANKS
    slot, first_rank = tile % NUM_SLOTS, place // (NUM_SLOTS * RANK_STEP) * RANK_STEP
    own_ranks = tl.arange(0, RANK_STEP)
    a_rows = a + (tile * RANK_STEP + own_ranks).to(tl.int64)[:, None] * in_features
    start = split * (NUM_BLOCKS * BLOCK_IN)
    a_tiles = ()  # copied before the wait
    for block in tl.static_range(NUM_BLOCKS):
        columns = start + block * BLOCK_IN + tl.arange(0, BLOCK_IN)
        a_tiles = a_tiles + (tl.load(a_rows + columns[None, :], mask=(columns < in_features)[None, :], other=0.0),)  # noqa: RUF005
    rows = tl.arange(0, BLOCK_ROWS)
    is_own = tl.load(row_slots + rows, mask=rows < num_rows, other=-1) == slot
    is_own &= first_rank < tl.load(ranks + slot * NUM_PROJECTIONS + projection)
    num_own = tl.sum(is_own.to(tl.int32), 0)
    order = tl.cumsum(is_own.to(tl.int32), 0) - 1  # of each own row
    if PDL:
        gdc_wait()
    tl.atomic_add(counters + 1, 1, sem="release")

    sums_at = partial_sums + tile * (NUM_SPLITS * BLOCK_ROWS * RANK_STEP)
    group = tl.arange(0, 16)
    for first in tl.range(0, num_own, 16, num_stages=1):
        is_place = is_own[None, :] & (order[None, :] == (first + group)[:, None])
        row = tl.sum(tl.where(is_place, rows[None, :], 0), 1)
        is_row = first + group < num_own
        sums = tl.zeros([16, RANK_STEP], tl.float32)
        x_tiles = ()
        for block in tl.static_range(NUM_BLOCKS):
            columns = start + block * BLOCK_IN + tl.arange(0, BLOCK_IN)
            mask = is_row[:, None] & (columns < in_features)[None, :]
            x_tiles = x_tiles + (tl.load(x + row[:, None] * x_stride + columns[None, :], mask=mask, other=0.0),)  # noqa: RUF005
        for block in tl.static_range(NUM_BLOCKS):
            # Values that are no more those of a load go through shared memory one after the other, in the same place.
            x_tile = tl.where(is_row[:, None], x_tiles[block], 0.0)
            a_tile = tl.where(first < num_own, a_tiles[block], 0.0)
            sums = tl.dot(x_tile, tl.trans(a_tile), sums, input_precision="ieee")
        at = sums_at + (split * BLOCK_ROWS + row)[:, None] * RANK_STEP + own_ranks[None, :]
        tl.store(at, sums, mask=is_row[:, None])
    tl.debug_barrier()  # all threads store before one of them counts
    if tl.atomic_add(num_parts_done + tile, 1, sem="acq_rel") == NUM_SPLITS - 1:
        h = tl.zeros([BLOCK_ROWS, RANK_STEP], tl.float32)
        at = sums_at + rows[:, None] * RANK_STEP + own_ranks[None, :]
        for i in tl.static_range(NUM_SPLITS):
            h += tl.load(at + i * (BLOCK_ROWS * RANK_STEP), mask=is_own[:, None], other=0.0)
        target = hidden + (projection * MAX_ROWS + rows)[:, None] * HIDDEN_STRIDE + place + own_ranks[None, :]
        tl.store(target, h.to(hidden.dtype.element_ty))
        tl.store(num_parts_done + tile, 0)
        tl.debug_barrier()
        tl.atomic_add(counters, 1, sem="release")
