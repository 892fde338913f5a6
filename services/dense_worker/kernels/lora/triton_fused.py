"""The linear layer of 1 to 64 tokens with the deltas of their adapters, in one kernel: `triton_skinny` and more.

The first programs compute x A^T for all slots that rows of the step have; the others compute tiles of W x, wait for
those sums, and add their product with B. So the sums are ready long before they are needed, and no kernel of adapters
stands between the layers' kernels. Reference: `torch_lora.TorchLora`. Sums are in float32 and in a fixed order: a row's
result does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.rows_product import MAX_PROJECTIONS, RowsProduct
from services.dense_worker.kernels.linear.triton_skinny import SkinnyTiles, choose_skinny_tiles
from services.dense_worker.kernels.linear.triton_skinny_hopper import can_copy_ahead
from services.dense_worker.kernels.linear.triton_tiles import (
    MAX_ROWS,
    SplitWorkspace,
    add_splits,
    part_of_split,
    sum_products,
    write_features,
)
from services.dense_worker.kernels.lora.triton_fused_hopper import (
    HiddenWorkspace,
    SlotMemory,
    copied_ahead_linear,
    row_deltas,
)
from services.dense_worker.kernels.lora.triton_lora import RANK_STEP
from services.dense_worker.kernels.norm.norm import SplitNorm
from services.dense_worker.kernels.norm.triton_split_norm import (
    norm_factors,
    operands_of_halves,
    read_squares,
    write_for_norm,
)
from services.dense_worker.kernels.triton_launch import KernelLauncher

MAX_RANKS = 512  # of all slots together; each program goes through all of them, also those that nobody uses
_BLOCK_OUT = 64
_MAX_BLOCK_RANKS = 128
_COPIED_AHEAD_FROM = 33  # rows; with fewer, `triton_fused_hopper` is slower (bench/results/lora.md)
_NUM_PARTS = 2  # of in_features, whose sums with A are computed apart; with more, the products start later


class FusedWorkspace:
    """What the programs of a launch tell each other, in device memory."""

    def __init__(self, slots: Sequence[torch.Tensor], num_sms: int) -> None:
        """slots: A of each layer, as in `SlotMemory`."""
        device = slots[0].device
        max_num_ranks = max(a[..., 0].numel() for a in slots)
        self.hidden = torch.empty(_NUM_PARTS * MAX_ROWS * max_num_ranks, dtype=torch.float32, device=device)  # x A^T
        # How many programs have written it, for each product of a step; to be set to zero before the step. Rows of 16
        # bytes, because Triton compiles a kernel again for other alignments.
        self.num_shrunk = torch.zeros(len(slots), 4, dtype=torch.int32, device=device)
        self.splits = SplitWorkspace(device, num_sms)
        self.on_hopper = HiddenWorkspace(slots, num_sms)


def fused_linear(
    launcher: KernelLauncher,
    x: torch.Tensor,  # [n, in_features], n <= MAX_ROWS, 16 bits, rows contiguous
    weight: torch.Tensor,  # [out_features, in_features]; with a gated activation [2 * out_features, in_features]
    bias: torch.Tensor | None,  # [weight's rows]
    out: torch.Tensor,  # [n, out_features], x's dtype
    slots: SlotMemory,
    row_slots: torch.Tensor,  # int32 [n]: the slot of each row or -1; written before any kernel of `launcher`
    workspace: FusedWorkspace,
    index: int,  # of the product in its step
    rows_product: RowsProduct,  # with deltas
    *,
    activation: MlpActivation | None,  # of the product
    residual: torch.Tensor | None,  # [n, out_features], strides of `out`: add it; may be `out`
    norm: SplitNorm | None,  # before the product, as in `skinny_linear`
    norm_after: SplitNorm | None,  # of `out`
) -> None:
    """Writes activation(x (W + B A)^T + bias) to `out`, A and B being those of each row. Then adds `residual`."""
    is_gated = activation is not None and activation.is_gated
    num_rows, out_features = out.shape
    in_features = x.shape[1]
    num_projections, num_groups, num_slots, _, _ = slots.a.shape
    max_rank = num_groups * RANK_STEP
    assert num_projections == 2 or not is_gated, "the halves are two projections"
    deltas = row_deltas(slots, row_slots, workspace.on_hopper, workspace.num_shrunk[index])
    if len(slots.first_features) <= MAX_PROJECTIONS:
        shape = rows_product.shape_of(x, weight, bias, out, activation, residual, norm, norm_after)
        if shape is not None and deltas.num_tiles <= shape.num_programs:
            rows_product.multiply(shape, x, weight, out, residual, norm, norm_after, deltas)
            return
    if num_rows >= _COPIED_AHEAD_FROM and can_copy_ahead(launcher, x, weight):
        fused = {"activation": activation, "residual": residual, "norm": norm, "norm_after": norm_after}
        copied_ahead_linear(launcher, x, weight, bias, out, deltas, workspace.splits, **fused)
        return
    if norm_after is not None and launcher.is_hopper:  # products of other alignment have lower tiles, and so more
        norm_after.squares.zero_()
    tiles = _choose_tiles(num_rows, out_features, is_gated, launcher.num_sms)
    num_tiles = triton.cdiv(out_features, _BLOCK_OUT)
    num_rank_tiles = num_projections * triton.cdiv(num_slots * max_rank, _BLOCK_OUT)
    launcher(
        _fused_kernel,
        (num_rank_tiles * _NUM_PARTS + num_tiles * tiles.num_splits,),
        out,
        x,
        weight,
        bias,
        residual,
        *operands_of_halves(norm, norm_after),
        *slots[:4],
        row_slots,
        workspace.hidden,
        workspace.num_shrunk[index],
        workspace.splits.partial_sums,
        workspace.splits.num_done,
        num_rows,
        out_features,
        in_features,
        x.stride(0),
        out.stride(0),
        ACTIVATION=None if activation is None else activation.function.value,
        IS_GATED=is_gated,
        IS_PADDED=in_features % tiles.block_in != 0,
        NUM_PROJECTIONS=num_projections,
        NUM_SLOTS=num_slots,
        MAX_RANK=max_rank,
        RANK_STEP=RANK_STEP,
        BLOCK_ROWS=tiles.block_rows,
        BLOCK_OUT=_BLOCK_OUT,
        BLOCK_IN=tiles.block_in,
        BLOCK_RANKS=min(triton.next_power_of_2(num_slots * max_rank), _MAX_BLOCK_RANKS),
        NUM_PARTS=_NUM_PARTS,
        NUM_SPLITS=tiles.num_splits,
        NUM_STAGES=tiles.num_stages,
        num_warps=4,
    )


def _choose_tiles(num_rows: int, out_features: int, is_gated: bool, num_sms: int) -> SkinnyTiles:
    """Those of the product alone; of many rows and more tiles than SMs smaller ones, so that two share an SM."""
    tiles = choose_skinny_tiles(num_rows, out_features, is_gated, num_sms)
    if tiles.block_rows < MAX_ROWS or triton.cdiv(out_features, _BLOCK_OUT) <= num_sms:
        return tiles
    return replace(tiles, block_in=64, num_stages=3) if is_gated else replace(tiles, block_in=128, num_stages=2)


@triton.jit(do_not_specialize=["num_rows"])
def _fused_kernel(
    out,
    x,
    weight,
    bias,
    residual,
    squares_before,
    eps,
    weight_after,
    weighted,
    squares_after,
    a,
    b,
    ranks,
    column_starts,
    row_slots,
    hidden,
    num_shrunk,
    partial_sums,
    num_splits_done,
    num_rows,
    out_features,
    in_features,
    x_stride,
    out_stride,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_PADDED: tl.constexpr,
    NUM_PROJECTIONS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANK_STEP: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes BLOCK_OUT ranks over one of NUM_PARTS parts of in_features, or does as `_skinny_kernel`."""
    if PDL:
        gdc_launch_dependents()
    rows = tl.arange(0, BLOCK_ROWS)
    is_row = rows < num_rows
    slots = tl.load(row_slots + rows, mask=is_row, other=-1)
    x_rows = x + rows[:, None] * x_stride
    rank_tiles: tl.constexpr = (NUM_SLOTS * MAX_RANK + BLOCK_OUT - 1) // BLOCK_OUT
    num_shrinking: tl.constexpr = NUM_PARTS * NUM_PROJECTIONS * rank_tiles
    program = tl.program_id(0)
    if program < num_shrinking:
        part, tile = program % NUM_PARTS, program // NUM_PARTS
        projection = tile // rank_tiles
        places = tile % rank_tiles * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        slot, rank = places // RANK_STEP % NUM_SLOTS, _rank_of(places, NUM_SLOTS, RANK_STEP)
        num_ranks = tl.load(ranks + slot * NUM_PROJECTIONS + projection)
        is_used = (rank < num_ranks) & (tl.max((slots[None, :] == slot[:, None]).to(tl.int32), 1) > 0)
        # Ranks that no row uses read the first one's weights and are never stored, so weights need no mask.
        a_rows = tl.where(is_used, projection * (NUM_SLOTS * MAX_RANK) + places, 0).to(tl.int64)
        start, end = part_of_split(part, in_features, BLOCK_IN, NUM_PARTS)
        end *= tl.max(is_used.to(tl.int32), 0)
        if PDL:
            gdc_wait()
        sums, _ = sum_products(
            a + a_rows[:, None] * in_features, 0, x_rows, is_row, start, end, in_features,
            False, IS_PADDED, BLOCK_ROWS, BLOCK_OUT, BLOCK_IN, NUM_STAGES,
        )  # fmt: skip
        at = ((part * num_rows + rows) * NUM_PROJECTIONS + projection)[None, :] * (NUM_SLOTS * MAX_RANK)
        tl.store(hidden + at + places[:, None], sums, mask=is_used[:, None] & is_row[None, :])
        tl.debug_barrier()  # all threads store before one of them counts
        tl.atomic_add(num_shrunk, 1, sem="release")
    else:
        dtype: tl.constexpr = weight.dtype.element_ty
        num_tiles = tl.cdiv(out_features, BLOCK_OUT)
        tile, split = (program - num_shrinking) % num_tiles, (program - num_shrinking) // num_tiles
        features = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        is_feature = features < out_features
        # Features beyond the last read the first one's weights and are never stored.
        w_rows = weight + tl.where(is_feature, features, 0).to(tl.int64)[:, None] * in_features
        up_offset = out_features.to(tl.int64) * in_features
        blocks: tl.constexpr = (NUM_SLOTS * MAX_RANK + BLOCK_RANKS - 1) // BLOCK_RANKS
        first, end_projection = 0, 1  # projections of the tile
        if not IS_GATED:
            for index in tl.static_range(1, NUM_PROJECTIONS):
                projection_start = tl.load(column_starts + index)
                first += (projection_start <= tile * BLOCK_OUT).to(tl.int32)
                end_projection += (projection_start < tile * BLOCK_OUT + BLOCK_OUT).to(tl.int32)
        # Loaded before the wait, while the kernel before still runs.
        b_tile, b_ranks = _load_b(
            b, ranks, column_starts, slots, features, first * blocks,
            NUM_PROJECTIONS, NUM_SLOTS, MAX_RANK, RANK_STEP, BLOCK_RANKS,
        )  # fmt: skip
        if IS_GATED:
            b_up, up_ranks = _load_b(
                b, ranks, column_starts, slots, features + out_features, blocks,
                NUM_PROJECTIONS, NUM_SLOTS, MAX_RANK, RANK_STEP, BLOCK_RANKS,
            )  # fmt: skip
        if PDL:
            gdc_wait()
        if squares_before is not None:
            squares = read_squares(squares_before, tl.arange(0, BLOCK_OUT), rows, in_features, BLOCK_OUT)
        start, end = part_of_split(split, in_features, BLOCK_IN, NUM_SPLITS)
        sums, up_sums = sum_products(
            w_rows, up_offset, x_rows, is_row, start, end, in_features,
            IS_GATED, IS_PADDED, BLOCK_ROWS, BLOCK_OUT, BLOCK_IN, NUM_STAGES,
        )  # fmt: skip
        is_last = True
        if NUM_SPLITS > 1:
            sums, is_last = add_splits(
                sums, partial_sums, num_splits_done, tile, split, BLOCK_ROWS, BLOCK_OUT, NUM_SPLITS
            )
        if is_last:
            # This ends, because a GPU starts programs in their order, and those that are waited for wait for none.
            while tl.atomic_add(num_shrunk, 0, sem="acquire") < num_shrinking:
                pass
            sums = _expand(
                sums, b_tile, b_ranks, hidden, b, ranks, column_starts, slots, features, first, end_projection,
                num_rows, NUM_PROJECTIONS, NUM_SLOTS, MAX_RANK, RANK_STEP, BLOCK_RANKS, BLOCK_ROWS, NUM_PARTS,
            )  # fmt: skip
            if IS_GATED:
                up_sums = _expand(
                    up_sums, b_up, up_ranks, hidden, b, ranks, column_starts, slots, features + out_features, 1, 2,
                    num_rows, NUM_PROJECTIONS, NUM_SLOTS, MAX_RANK, RANK_STEP, BLOCK_RANKS, BLOCK_ROWS, NUM_PARTS,
                )  # fmt: skip
            if squares_before is not None:
                factors = norm_factors(squares, in_features, eps)
                sums, up_sums = sums * factors, up_sums * factors
            y = write_features(
                out, sums, up_sums, bias, residual, features, rows, is_row, out_features, out_stride,
                ACTIVATION, IS_GATED, dtype,
            )  # fmt: skip
            if weight_after is not None:
                write_for_norm(
                    y, weight_after, weighted, squares_after, tile, features, rows, is_row, out_features, BLOCK_OUT
                )


@triton.jit
def _expand(
    sums,  # float32 [BLOCK_OUT, BLOCK_ROWS]
    b_tile,  # of the first step
    num_ranks,  # of the first step
    hidden,
    b,
    ranks,
    column_starts,
    slots,  # [BLOCK_ROWS]
    columns,  # [BLOCK_OUT]
    first_projection,
    end_projection,
    num_rows,
    NUM_PROJECTIONS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANK_STEP: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
):
    """Adds the deltas of each row's slot in these projections. One step is a block of ranks of one projection."""
    blocks: tl.constexpr = (NUM_SLOTS * MAX_RANK + BLOCK_RANKS - 1) // BLOCK_RANKS
    rows = tl.arange(0, BLOCK_ROWS)
    end = end_projection * blocks
    for step in tl.range(first_projection * blocks, end, num_stages=1):
        places = step % blocks * BLOCK_RANKS + tl.arange(0, BLOCK_RANKS)
        is_rank = tl.max_constancy(_rank_of(places, NUM_SLOTS, RANK_STEP) < num_ranks, RANK_STEP)
        is_own = (slots[:, None] == (places // RANK_STEP % NUM_SLOTS)[None, :]) & is_rank[None, :]
        at = (rows * NUM_PROJECTIONS + step // blocks)[:, None] * (NUM_SLOTS * MAX_RANK) + places[None, :]
        h = tl.zeros([BLOCK_ROWS, BLOCK_RANKS], tl.float32)
        for part in tl.static_range(NUM_PARTS):
            part_start = hidden + part * num_rows * (NUM_PROJECTIONS * NUM_SLOTS * MAX_RANK)
            h += tl.load(part_start + at, mask=is_own, other=0.0)
        sums = tl.dot(b_tile, tl.trans(h.to(b_tile.dtype)), sums)
        if step + 1 < end:
            b_tile, num_ranks = _load_b(
                b, ranks, column_starts, slots, columns, step + 1,
                NUM_PROJECTIONS, NUM_SLOTS, MAX_RANK, RANK_STEP, BLOCK_RANKS,
            )  # fmt: skip
    return sums


@triton.jit
def _load_b(
    b,
    ranks,
    column_starts,
    slots,  # [BLOCK_ROWS]
    columns,  # [BLOCK_OUT]
    step,
    NUM_PROJECTIONS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANK_STEP: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
):
    """B [columns, ranks] of a step, zero where no row uses it, and the number of ranks of each rank's slot."""
    blocks: tl.constexpr = (NUM_SLOTS * MAX_RANK + BLOCK_RANKS - 1) // BLOCK_RANKS
    projection = step // blocks
    places = step % blocks * BLOCK_RANKS + tl.arange(0, BLOCK_RANKS)
    slot, rank = places // RANK_STEP % NUM_SLOTS, _rank_of(places, NUM_SLOTS, RANK_STEP)
    num_ranks = tl.load(ranks + slot * NUM_PROJECTIONS + projection)
    is_used = (rank < num_ranks) & (tl.max((slots[:, None] == slot[None, :]).to(tl.int32), 0) > 0)
    is_used = tl.max_constancy(is_used, RANK_STEP)  # of which a number of ranks is a multiple
    is_column = columns >= tl.load(column_starts + projection)
    is_column &= columns < tl.load(column_starts + projection + 1)
    b_rows = b + columns.to(tl.int64)[:, None] * (NUM_SLOTS * MAX_RANK)
    return tl.load(b_rows + places[None, :], mask=is_column[:, None] & is_used[None, :], other=0.0), num_ranks


@triton.jit
def _rank_of(places, NUM_SLOTS: tl.constexpr, RANK_STEP: tl.constexpr):
    """The rank in its slot; behind the last place it is none that a slot has."""
    return places // (NUM_SLOTS * RANK_STEP) * RANK_STEP + places % RANK_STEP
