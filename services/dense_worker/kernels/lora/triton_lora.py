"""The adapters' deltas on CUDA: two products for rows grouped by adapter, with any ranks in one launch.

`shrink` computes x A^T for each projection that a layer was merged from, `expand` adds its product with B. Reference:
`torch_lora.TorchLora`. A program works on rows of one adapter, which `plan_blocks` finds on the device, so that a
captured step serves any batch. Nothing is specialised on the number of rows or on ranks. Sums are in float32 and in a
fixed order: a row's result does not depend on the other rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.dense_worker.kernels.linear.triton_tiles import part_of_split
from services.dense_worker.kernels.triton_launch import KernelLauncher

RANK_STEP = 16  # ranks are padded to a multiple of it with zeros
FEW_ROWS = 256  # up to so many rows the sums of `shrink` are divided, to occupy the GPU
FEW_ROWS_SPLITS = 8
_BLOCK_IN = 128
_BLOCK_COLUMNS = 128


class Blocks(NamedTuple):
    """The rows of a step by adapter, in blocks that each belong to one."""

    order: torch.Tensor  # int32 [n]: rows in the order of their slots
    table: torch.Tensor  # int32 [3, num_blocks]: slot or -1, first index in `order`, index after the slot's last
    block_rows: int  # most rows of a block


def block_rows_for(num_rows: int) -> int:
    """Rows of a block: the narrowest tile of a tensor core for decoding, a wide one for prompts."""
    return 16 if num_rows <= FEW_ROWS else 64


def num_splits_for(num_rows: int) -> int:
    """The parts of in_features whose sums are computed apart."""
    return FEW_ROWS_SPLITS if num_rows <= FEW_ROWS else 1


def plan_blocks(row_slots: torch.Tensor, num_slots: int, block_rows: int) -> Blocks:
    """Groups rows by slot: int32 [n], -1 for rows without an adapter. The shapes of the result depend only on n.

    Never waits for the device, and can be captured.
    """
    device = row_slots.device
    num_blocks = len(row_slots) // block_rows + num_slots  # each slot has at most one block that is not full
    keys = torch.where(row_slots < 0, num_slots, row_slots)
    order = torch.argsort(keys, stable=True)
    slots = torch.arange(num_slots, device=device)
    counts = (keys[:, None] == slots).sum(0)
    blocks_of_slot = (counts + block_rows - 1) // block_rows
    block_ends, row_ends = blocks_of_slot.cumsum(0), counts.cumsum(0)
    blocks = torch.arange(num_blocks, device=device)
    slot = (blocks[:, None] >= block_ends).sum(1)
    known = slot.clamp(max=num_slots - 1)
    starts = (row_ends - counts)[known] + (blocks - (block_ends - blocks_of_slot)[known]) * block_rows
    table = torch.stack([torch.where(slot < num_slots, slot, -1), starts, row_ends[known]])
    return Blocks(order.int(), table.int(), block_rows)


def shrink(
    launcher: KernelLauncher,
    x: torch.Tensor,  # [n, in_features], rows contiguous
    a: torch.Tensor,  # [num_projections, max_rank / RANK_STEP, num_slots, RANK_STEP, in_features]
    ranks: torch.Tensor,  # int32 [num_slots, num_projections], multiples of RANK_STEP
    blocks: Blocks,
    hidden: torch.Tensor,  # float32 [num_splits, n, num_projections, max_rank]: partial sums; read up to the rank only
) -> None:
    """Computes x A^T of each row's adapter; rows without an adapter are left out."""
    num_splits, num_rows, num_projections, max_rank = hidden.shape
    num_blocks = blocks.table.shape[1]
    launcher(
        _shrink_kernel,
        (num_blocks, num_projections, num_splits),
        hidden,
        x,
        a,
        ranks,
        blocks.order,
        blocks.table,
        num_blocks,
        num_rows,
        x.stride(0),
        x.shape[1],
        NUM_PROJECTIONS=num_projections,
        NUM_SLOTS=a.shape[2],
        MAX_RANK=max_rank,
        BLOCK_ROWS=blocks.block_rows,
        BLOCK_RANK=RANK_STEP,
        BLOCK_IN=_BLOCK_IN,
        NUM_SPLITS=num_splits,
        num_warps=4,
    )


def expand(
    launcher: KernelLauncher,
    hidden: torch.Tensor,  # float32 [num_splits, n, num_projections, max_rank], of `shrink`
    b: torch.Tensor,  # [out_features, max_rank / RANK_STEP, num_slots, RANK_STEP], scaled
    ranks: torch.Tensor,  # int32 [num_slots, num_projections]
    column_starts: torch.Tensor,  # int32 [num_projections + 1]: the columns of each projection
    widest: int,  # most columns of a projection
    blocks: Blocks,
    out: torch.Tensor,  # [n, out_features], rows contiguous
) -> None:
    """Adds the product with B of each row's adapter to `out`."""
    num_splits, num_rows, num_projections, max_rank = hidden.shape
    num_blocks = blocks.table.shape[1]
    launcher(
        _expand_kernel,
        (num_blocks, num_projections, triton.cdiv(widest, _BLOCK_COLUMNS)),
        out,
        hidden,
        b,
        ranks,
        column_starts,
        blocks.order,
        blocks.table,
        num_blocks,
        num_rows,
        out.stride(0),
        NUM_PROJECTIONS=num_projections,
        NUM_SLOTS=b.shape[2],
        MAX_RANK=max_rank,
        BLOCK_ROWS=blocks.block_rows,
        BLOCK_RANK=RANK_STEP,
        BLOCK_COLUMNS=_BLOCK_COLUMNS,
        NUM_SPLITS=num_splits,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_blocks", "num_rows"])
def _shrink_kernel(
    hidden,
    x,
    a,
    ranks,
    order,
    table,
    num_blocks,
    num_rows,
    x_stride,
    in_features,
    NUM_PROJECTIONS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes a block of rows, one projection, and one of NUM_SPLITS parts of in_features."""
    if PDL:
        gdc_launch_dependents()
    block, projection, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, rank, rows, is_row = _load_block(
        table, ranks, order, block, projection, num_blocks, NUM_PROJECTIONS, BLOCK_ROWS
    )
    if PDL:
        gdc_wait()
    if slot >= 0:
        x_rows = x + rows[:, None] * x_stride
        a_start = a + (projection * NUM_SLOTS * MAX_RANK + slot * BLOCK_RANK).to(tl.int64) * in_features
        target = hidden + (split.to(tl.int64) * num_rows + rows[:, None]) * (NUM_PROJECTIONS * MAX_RANK)
        target += projection * MAX_RANK
        start, end = part_of_split(split, in_features, BLOCK_IN, NUM_SPLITS)
        for first_rank in tl.range(0, rank, BLOCK_RANK):
            each_rank = first_rank + tl.arange(0, BLOCK_RANK)
            place = first_rank * NUM_SLOTS + tl.arange(0, BLOCK_RANK)  # behind those of the slots' first ranks
            a_rows = a_start + place.to(tl.int64)[:, None] * in_features
            sums = tl.zeros([BLOCK_ROWS, BLOCK_RANK], tl.float32)
            for first_column in tl.range(start, end, BLOCK_IN):
                columns = first_column + tl.arange(0, BLOCK_IN)
                is_column = columns < end
                mask = is_row[:, None] & is_column[None, :]
                x_tile = tl.load(x_rows + columns[None, :], mask=mask, other=0.0)
                a_tile = tl.load(a_rows + columns[None, :], mask=is_column[None, :], other=0.0)
                sums = tl.dot(x_tile, tl.trans(a_tile), sums, input_precision="ieee")
            tl.store(target + each_rank[None, :], sums, mask=is_row[:, None])


@triton.jit(do_not_specialize=["num_blocks", "num_rows"])
def _expand_kernel(
    out,
    hidden,
    b,
    ranks,
    column_starts,
    order,
    table,
    num_blocks,
    num_rows,
    out_stride,
    NUM_PROJECTIONS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program adds BLOCK_COLUMNS columns of one projection to a block of rows."""
    dtype: tl.constexpr = b.dtype.element_ty
    if PDL:
        gdc_launch_dependents()
    block, projection, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, rank, rows, is_row = _load_block(
        table, ranks, order, block, projection, num_blocks, NUM_PROJECTIONS, BLOCK_ROWS
    )
    columns = tl.load(column_starts + projection) + tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_column = (columns < tl.load(column_starts + projection + 1)) & (rank > 0)
    each_rank = tl.arange(0, BLOCK_RANK)[None, :]
    b_rows = b + columns.to(tl.int64)[:, None] * (NUM_SLOTS * MAX_RANK) + tl.maximum(slot, 0) * BLOCK_RANK + each_rank
    b_tile = tl.load(b_rows, mask=is_column[:, None], other=0.0)
    if PDL:
        gdc_wait()
    if rank > 0:
        target = out + rows[:, None] * out_stride + columns[None, :]
        mask = is_row[:, None] & is_column[None, :]
        y = tl.load(target, mask=mask, other=0.0)
        h_rows = hidden + rows[:, None] * (NUM_PROJECTIONS * MAX_RANK) + projection * MAX_RANK + each_rank
        split_stride = num_rows.to(tl.int64) * (NUM_PROJECTIONS * MAX_RANK)
        sums = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        for first_rank in tl.range(0, rank, BLOCK_RANK):
            h = tl.zeros([BLOCK_ROWS, BLOCK_RANK], tl.float32)
            for split in tl.static_range(NUM_SPLITS):
                h += tl.load(h_rows + split * split_stride + first_rank, mask=is_row[:, None], other=0.0)
            sums = tl.dot(h.to(dtype), tl.trans(b_tile), sums, input_precision="ieee")
            next_rank = first_rank + BLOCK_RANK
            b_tile = tl.load(b_rows + next_rank * NUM_SLOTS, mask=is_column[:, None] & (next_rank < rank), other=0.0)
        tl.store(target, (y.to(tl.float32) + sums).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _load_block(
    table,
    ranks,
    order,
    block,
    projection,
    num_blocks,
    NUM_PROJECTIONS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """The slot of a block or -1, the rank of its projection, 0 for no slot, and the block's rows.

    May come before `gdc_wait`: kernels of torch have written the tables, and none of ours starts before those ended.
    """
    slot = tl.load(table + block)
    rank = tl.load(ranks + slot * NUM_PROJECTIONS + projection, mask=slot >= 0, other=0)
    at = tl.load(table + num_blocks + block) + tl.arange(0, BLOCK_ROWS)
    is_row = (at < tl.load(table + 2 * num_blocks + block)) & (slot >= 0)
    rows = tl.load(order + at, mask=is_row, other=0).to(tl.int64)
    return slot, rank, rows, is_row
