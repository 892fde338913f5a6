"""`triton_skinny` on Hopper: programs copy their first weights before the previous kernel has ended.

Triton puts weights and rows into one pipeline, which cannot begin before the rows are there. This kernel is in Gluon,
Triton's language of explicit copies, which has no interpreter: it runs on GPUs alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.dense_worker.kernels.linear.quantized.operands import CodeScales
from services.dense_worker.kernels.linear.triton_tiles import (
    MAX_ROWS as _MAX_ROWS,
)
from services.dense_worker.kernels.linear.triton_tiles import (
    SplitWorkspace,
    part_of_split,
    write_features,
)
from services.dense_worker.kernels.lora.tensors import RowDeltas
from services.dense_worker.kernels.norm.norm import SplitNorm
from services.dense_worker.kernels.norm.triton_split_norm import (
    norm_factors,
    operands_of_halves,
    read_squares,
    write_for_norm,
)
from services.dense_worker.kernels.tensor_map import num_rows_there
from services.dense_worker.kernels.triton_launch import KernelLauncher

_ALIGNMENT = 16  # bytes, of the rows that the copy unit reads
MAX_ROWS = gl.constexpr(_MAX_ROWS)
RANK_STEP = gl.constexpr(16)  # as in `triton_lora`
# Triton 3.6 has the older names, 3.9 only the later ones.
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


def can_copy_ahead(launcher: KernelLauncher, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether this is a Hopper, and rows and weights lie as its copy unit needs them."""
    places = (x.data_ptr(), weight.data_ptr(), x.stride(0) * x.itemsize, weight.stride(0) * x.itemsize)
    return launcher.is_hopper and not any(place % _ALIGNMENT for place in places)


def multiply_copied_ahead(
    launcher: KernelLauncher,
    x: torch.Tensor,  # [n, in_features], rows contiguous
    weight: torch.Tensor,  # [weight's rows, in_features]
    bias: torch.Tensor | None,
    out: torch.Tensor,  # [n, out_features]
    workspace: SplitWorkspace,
    scales: CodeScales | None,
    residual: torch.Tensor | None,
    norm: SplitNorm | None,
    norm_after: SplitNorm | None,
    deltas: RowDeltas | None = None,
    **constants: Any,  # the kernel's, but those of this function
) -> None:
    """As `skinny_linear`, where `can_copy_ahead` says so; with the deltas of the rows' adapters."""
    block_rows, block_out, block_in = (constants[f"BLOCK_{name}"] for name in ("ROWS", "OUT", "IN"))
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * x.itemsize, rank=2)
    x_shape = [num_rows_there(x, block_rows), x.shape[1]]
    of_deltas: tuple[Any, ...] = (None,) * 6
    if deltas is not None:
        hidden = deltas.hidden.flatten(0, 1)
        of_deltas = (
            _descriptor_of_tiles(deltas.b, constants["HEIGHT"], block_out, block_in),
            TensorDescriptor(hidden, list(hidden.shape), [hidden.stride(0), 1], [block_rows, block_in], layout),
            deltas.ranks,
            deltas.column_starts,
            deltas.row_slots,
            deltas.counters,
        )
        constants |= {
            "NUM_PROJECTIONS": len(deltas.hidden),
            "GROUP_SIZE": deltas.group_size,
            "RANK_TILES": deltas.num_tiles,
        }
    launcher(
        hopper_skinny_kernel,
        (triton.cdiv(out.shape[1], constants["HEIGHT"]), constants["NUM_SPLITS"]),
        out,
        TensorDescriptor(x, x_shape, [x.stride(0), 1], [block_rows, block_in], layout),
        _descriptor_of_tiles(weight, constants["HEIGHT"], block_out, block_in),
        None if scales is None else scales.rows,
        None if scales is None else scales.weights,
        bias,
        residual,
        *operands_of_halves(norm, norm_after),
        *of_deltas,
        workspace.partial_sums,
        workspace.num_done,
        len(x),
        out.shape[1],
        x.shape[1],
        out.stride(0),
        **constants,
    )


def _descriptor_of_tiles(weight: torch.Tensor, height: int, block_out: int, block_in: int) -> TensorDescriptor:
    """Of [tiles, height, in_features]: what a block has beyond a tile's height is zeros, and is not read.

    With `block_out` as height there is one tile of all rows.
    """
    height = len(weight) if height == block_out else height
    shape = [len(weight) // height, height, weight.shape[1]]
    strides = [height * weight.stride(0), weight.stride(0), 1]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * weight.itemsize, rank=3)
    return TensorDescriptor(weight, shape, strides, [1, block_out, block_in], layout)


@gluon.jit(do_not_specialize=["num_rows"])
def hopper_skinny_kernel(
    out,
    x,  # descriptor of [n, in_features], blocks [BLOCK_ROWS, BLOCK_IN]
    weight,  # descriptor of [tiles, rows of each, in_features], blocks [1, BLOCK_OUT, BLOCK_IN]
    x_scale,
    weight_scale,
    bias,
    residual,
    squares_before,
    eps,
    weight_after,
    weighted,
    squares_after,
    b,  # None: no adapters; descriptor of [tiles, rows of each, ranks], blocks as those of `weight`
    hidden,  # descriptor of [NUM_PROJECTIONS * MAX_ROWS, ranks], blocks [BLOCK_ROWS, BLOCK_IN]
    ranks,
    column_starts,
    row_slots,
    counters,
    partial_sums,
    num_done,
    num_rows,
    out_features,
    in_features,
    out_stride,
    DTYPE: gl.constexpr,
    ACTIVATION: gl.constexpr,
    IS_GATED: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    BLOCK_OUT: gl.constexpr,
    BLOCK_IN: gl.constexpr,
    NUM_SPLITS: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    HEIGHT: gl.constexpr,
    PDL: gl.constexpr,
    NUM_PROJECTIONS: gl.constexpr = 0,
    GROUP_SIZE: gl.constexpr = 0,
    RANK_TILES: gl.constexpr = 0,
):
    """One program computes HEIGHT features of all tokens over one of NUM_SPLITS parts of in_features.

    Those of the first part add the products with B, as if its ranks were more columns.
    """
    if PDL:
        gdc_launch_dependents()
    dtype: gl.constexpr = weight.dtype
    bits: gl.constexpr = dtype.primitive_bitwidth
    sums_dtype: gl.constexpr = gl.int32 if dtype == gl.int8 else gl.float32
    num_warps: gl.constexpr = gl.num_warps()
    multiplied: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_ROWS, 256 // bits])
    written: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, num_warps], [0, 1])
    num_parts: gl.constexpr = 2 if IS_GATED else 1
    num_bytes: gl.constexpr = (num_parts * BLOCK_OUT + BLOCK_ROWS) * BLOCK_IN * bits // 8  # of a tile

    tile, split = gl.program_id(0), gl.program_id(1)
    start, end = part_of_split(split, in_features, BLOCK_IN, NUM_SPLITS)
    num_tiles = gl.cdiv(end - start, BLOCK_IN)
    if HEIGHT == BLOCK_OUT:
        w_tile, w_row, up_tile, up_row = 0, tile * BLOCK_OUT, 0, out_features + tile * BLOCK_OUT
    else:
        w_tile, w_row, up_tile, up_row = tile, 0, out_features // HEIGHT + tile, 0
    w_tiles = gl.allocate_shared_memory(dtype, [NUM_STAGES, 1, BLOCK_OUT, BLOCK_IN], weight.layout)
    up_tiles = w_tiles
    if IS_GATED:
        up_tiles = gl.allocate_shared_memory(dtype, [NUM_STAGES, 1, BLOCK_OUT, BLOCK_IN], weight.layout)
    x_tiles = gl.allocate_shared_memory(dtype, [NUM_STAGES, BLOCK_ROWS, BLOCK_IN], x.layout)
    filled = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(filled.index(i), count=1)

    for i in gl.static_range(NUM_STAGES):
        is_tile = i < num_tiles
        at = start + i * BLOCK_IN
        mbarrier.expect(filled.index(i), num_bytes, pred=is_tile)
        _copy(weight, [w_tile, w_row, at], filled.index(i), w_tiles.index(i), pred=is_tile)
        if IS_GATED:
            _copy(weight, [up_tile, up_row, at], filled.index(i), up_tiles.index(i), pred=is_tile)
    if b is not None:
        first, num_rank_blocks, num_deltas = _deltas_of(
            tile, ranks, column_starts, row_slots, num_rows, written,
            IS_GATED, BLOCK_ROWS, BLOCK_IN, HEIGHT, NUM_PROJECTIONS, GROUP_SIZE,
        )  # fmt: skip
        num_deltas = gl.where(split == 0, num_deltas, 0)
        _await(counters + 1, 1)
    elif PDL:
        gdc_wait()
    for i in gl.static_range(NUM_STAGES):
        is_tile = i < num_tiles
        _copy(x, [0, start + i * BLOCK_IN], filled.index(i), x_tiles.index(i), pred=is_tile)

    if b is not None:  # of few features blocks of ranks are among the first
        for i in range(num_tiles, gl.minimum(num_tiles + num_deltas, NUM_STAGES)):
            _copy_delta(
                b, hidden, i - num_tiles, first, num_rank_blocks, w_tile, w_row, up_tile, up_row, filled.index(i),
                w_tiles.index(i), x_tiles.index(i), counters,
                IS_GATED, BLOCK_ROWS, BLOCK_OUT, BLOCK_IN, RANK_TILES,
            )  # fmt: skip

    rows = gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(0, written))
    own_features = gl.arange(0, BLOCK_OUT, layout=gl.SliceLayout(1, written))
    if squares_before is not None:  # which arrive during the loop
        squares = read_squares(squares_before, own_features, rows, in_features, BLOCK_OUT)

    sums = gl.zeros([BLOCK_OUT, BLOCK_ROWS], sums_dtype, multiplied)
    up_sums = gl.zeros([BLOCK_OUT, BLOCK_ROWS], sums_dtype, multiplied)
    stage, phase, last_stage = 0, 0, NUM_STAGES - 1
    for i in range(num_tiles):
        mbarrier.wait(filled.index(stage), phase)
        x_tile = x_tiles.index(stage).permute((1, 0))
        multiplied_tile = w_tiles.index(stage)._reinterpret(dtype, [BLOCK_OUT, BLOCK_IN], x.layout)
        sums = warpgroup_mma(multiplied_tile, x_tile, sums, is_async=True)
        if IS_GATED:
            multiplied_up_tile = up_tiles.index(stage)._reinterpret(dtype, [BLOCK_OUT, BLOCK_IN], x.layout)
            up_sums = warpgroup_mma(multiplied_up_tile, x_tile, up_sums, is_async=True)
            sums, up_sums = warpgroup_mma_wait(2, deps=[sums, up_sums])
        else:
            sums = warpgroup_mma_wait(1, deps=[sums])
        # The products of the tile before have ended: its stage gets the tile that follows those in flight.
        is_tile = (i > 0) & (i - 1 + NUM_STAGES < num_tiles)
        at = start + (i - 1 + NUM_STAGES) * BLOCK_IN
        free = filled.index(last_stage)
        mbarrier.expect(free, num_bytes, pred=is_tile)
        _copy(weight, [w_tile, w_row, at], free, w_tiles.index(last_stage), pred=is_tile)
        if IS_GATED:
            _copy(weight, [up_tile, up_row, at], free, up_tiles.index(last_stage), pred=is_tile)
        _copy(x, [0, at], free, x_tiles.index(last_stage), pred=is_tile)
        if b is not None:
            delta = i - 1 + NUM_STAGES - num_tiles
            if (i > 0) & (delta >= 0) & (delta < num_deltas):
                _copy_delta(
                    b, hidden, delta, first, num_rank_blocks, w_tile, w_row, up_tile, up_row, free,
                    w_tiles.index(last_stage), x_tiles.index(last_stage), counters,
                    IS_GATED, BLOCK_ROWS, BLOCK_OUT, BLOCK_IN, RANK_TILES,
                )  # fmt: skip
        last_stage = stage
        phase = gl.where(stage == NUM_STAGES - 1, phase ^ 1, phase)
        stage = gl.where(stage == NUM_STAGES - 1, 0, stage + 1)
    if IS_GATED:
        sums, up_sums = warpgroup_mma_wait(0, deps=[sums, up_sums])
    else:
        sums = warpgroup_mma_wait(0, deps=[sums])
    if b is not None:
        columns = tile * HEIGHT + gl.arange(0, BLOCK_OUT, layout=gl.SliceLayout(1, multiplied))
        for i in range(num_deltas):
            mbarrier.wait(filled.index(stage), phase)
            multiplied_tile = w_tiles.index(stage)._reinterpret(dtype, [BLOCK_OUT, BLOCK_IN], x.layout)
            delta_sums = gl.zeros([BLOCK_OUT, BLOCK_ROWS], sums_dtype, multiplied)
            delta_sums = warpgroup_mma(multiplied_tile, x_tiles.index(stage).permute((1, 0)), delta_sums, is_async=True)
            delta_sums = warpgroup_mma_wait(0, deps=[delta_sums])
            delta = i - 1 + NUM_STAGES
            if delta < num_deltas:
                _copy_delta(
                    b, hidden, delta, first, num_rank_blocks, w_tile, w_row, up_tile, up_row,
                    filled.index(last_stage), w_tiles.index(last_stage), x_tiles.index(last_stage), counters,
                    IS_GATED, BLOCK_ROWS, BLOCK_OUT, BLOCK_IN, RANK_TILES,
                )  # fmt: skip
            projection = first + i // num_rank_blocks
            if IS_GATED:
                sums += gl.where(projection == 0, delta_sums, 0.0)
                up_sums += gl.where(projection == 0, 0.0, delta_sums)
            else:
                is_own = columns >= gl.load(column_starts + projection)
                is_own &= columns < gl.load(column_starts + projection + 1)
                sums += gl.where(is_own[:, None], delta_sums, 0.0)
            last_stage = stage
            phase = gl.where(stage == NUM_STAGES - 1, phase ^ 1, phase)
            stage = gl.where(stage == NUM_STAGES - 1, 0, stage + 1)
    for i in gl.static_range(NUM_STAGES):
        mbarrier.invalidate(filled.index(i))

    is_row = rows < num_rows
    features = gl.where(own_features < HEIGHT, tile * HEIGHT + own_features, out_features)  # others: not stored
    sums = gl.convert_layout(sums, written)
    up_sums = gl.convert_layout(up_sums, written) if IS_GATED else sums
    if weight_scale is not None:
        sums, up_sums = sums.to(gl.float32), up_sums.to(gl.float32)
    is_last = True
    if NUM_SPLITS > 1:
        at = partial_sums + tile * (NUM_SPLITS * BLOCK_ROWS * BLOCK_OUT)
        at += rows[None, :] * BLOCK_OUT + own_features[:, None]
        sums, is_last = _add_splits(sums, at, num_done + tile, split, BLOCK_ROWS * BLOCK_OUT, NUM_SPLITS)
    if is_last:
        if weight_scale is not None:
            row_scales = gl.load(x_scale + rows, mask=is_row, other=0.0)[None, :]
            scaled_features = gl.where(features < out_features, features, 0)
            sums = sums * gl.load(weight_scale + scaled_features)[:, None] * row_scales
            if IS_GATED:
                up_sums = up_sums * gl.load(weight_scale + out_features + scaled_features)[:, None] * row_scales
        if squares_before is not None:
            factors = norm_factors(squares, in_features, eps)
            sums, up_sums = sums * factors, up_sums * factors
        y = write_features(
            out, sums, up_sums, bias, residual, features, rows, is_row, out_features, out_stride,
            ACTIVATION, IS_GATED, DTYPE,
        )  # fmt: skip
        if weight_after is not None:
            write_for_norm(
                y, weight_after, weighted, squares_after, tile, features, rows, is_row, out_features, BLOCK_OUT
            )
    if b is not None:
        gdc_wait()  # so that this kernel's end implies that of the one before


@gluon.jit
def _deltas_of(
    tile,
    ranks,
    column_starts,
    row_slots,
    num_rows,
    written: gl.constexpr,
    IS_GATED: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    BLOCK_IN: gl.constexpr,
    HEIGHT: gl.constexpr,
    NUM_PROJECTIONS: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
):
    """A tile's first projection, the blocks of ranks that adapters of rows have, and those of all its projections."""
    rows = gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(0, written))
    slots = gl.load(row_slots + rows, mask=rows < num_rows, other=-1)
    num_ranks = gl.zeros_like(slots)
    for projection in gl.static_range(NUM_PROJECTIONS):
        of_rows = gl.load(ranks + slots * NUM_PROJECTIONS + projection, mask=slots >= 0, other=0)
        num_ranks = gl.maximum(num_ranks, of_rows)
    num_rank_blocks = gl.cdiv(gl.max(num_ranks, 0) // RANK_STEP * GROUP_SIZE, BLOCK_IN)
    first, last = 0, NUM_PROJECTIONS - 1
    if not IS_GATED:
        last = 0
        for index in gl.static_range(1, NUM_PROJECTIONS):
            column = gl.load(column_starts + index)
            first += (column <= tile * HEIGHT).to(gl.int32)
            last += (column < tile * HEIGHT + HEIGHT).to(gl.int32)
    return first, num_rank_blocks, (last + 1 - first) * num_rank_blocks


@gluon.jit
def _copy_delta(
    b,
    hidden,
    delta,
    first,
    num_rank_blocks,
    w_tile,
    w_row,
    up_tile,
    up_row,
    filled,
    w_tiles,
    x_tiles,
    counters,
    IS_GATED: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    BLOCK_OUT: gl.constexpr,
    BLOCK_IN: gl.constexpr,
    RANK_TILES: gl.constexpr,
):
    """Copies a tile of B, and that of x A^T when it is there."""
    num_bytes: gl.constexpr = (BLOCK_OUT + BLOCK_ROWS) * BLOCK_IN * b.dtype.primitive_bitwidth // 8
    projection, at = first + delta // num_rank_blocks, delta % num_rank_blocks * BLOCK_IN
    mbarrier.expect(filled, num_bytes)
    if IS_GATED:
        w_tile, w_row = gl.where(projection == 0, w_tile, up_tile), gl.where(projection == 0, w_row, up_row)
    _copy(b, [w_tile, w_row, at], filled, w_tiles)
    _await(counters, RANK_TILES)
    _copy(hidden, [projection * MAX_ROWS, at], filled, x_tiles)


@gluon.jit
def _await(counter, count):
    """Waits for programs of the kernel before. They run already, or this one would not have been started."""
    while gl.atomic_add(counter, 0, sem="acquire") < count:
        pass
    _fence_copies()


@gluon.jit
def _fence_copies():
    """Orders what threads have read of global memory before what the copy unit reads."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _add_splits(sums, at, num_done, split, PART: gl.constexpr, NUM_SPLITS: gl.constexpr):
    """As `triton_tiles.add_splits`, for sums of any layout. `at`: where the tile's first part is."""
    gl.store(at + split * PART, sums)
    _barrier()  # all threads store before one of them counts
    is_last = gl.atomic_add(num_done, 1, sem="acq_rel") == NUM_SPLITS - 1
    if is_last:
        sums = gl.load(at)
        for i in gl.static_range(1, NUM_SPLITS):
            sums += gl.load(at + i * PART)
        gl.store(num_done, 0)
    return sums, is_last
