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
from services.dense_worker.kernels.linear.triton_tiles import SplitWorkspace, part_of_split, write_features
from services.dense_worker.kernels.triton_launch import KernelLauncher

_ALIGNMENT = 16  # bytes, of the rows that the copy unit reads
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
    **constants: Any,  # the kernel's, but those of this function
) -> None:
    """As `skinny_linear`, where `can_copy_ahead` says so."""
    block_rows, block_out, block_in = (constants[f"BLOCK_{name}"] for name in ("ROWS", "OUT", "IN"))
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * x.itemsize, rank=2)
    launcher(
        hopper_skinny_kernel,
        (triton.cdiv(out.shape[1], block_out), constants["NUM_SPLITS"]),
        out,
        TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [block_rows, block_in], layout),
        TensorDescriptor(weight, list(weight.shape), [weight.stride(0), 1], [block_out, block_in], layout),
        None if scales is None else scales.rows,
        None if scales is None else scales.weights,
        bias,
        residual,
        workspace.partial_sums,
        workspace.num_done,
        len(x),
        out.shape[1],
        x.shape[1],
        out.stride(0),
        **constants,
    )


@gluon.jit(do_not_specialize=["num_rows"])
def hopper_skinny_kernel(
    out,
    x,  # descriptor of [n, in_features], blocks [BLOCK_ROWS, BLOCK_IN]
    weight,  # descriptor of [weight's rows, in_features], blocks [BLOCK_OUT, BLOCK_IN]
    x_scale,
    weight_scale,
    bias,
    residual,
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
    PDL: gl.constexpr,
):
    """One program computes BLOCK_OUT features of all tokens over one of NUM_SPLITS parts of in_features."""
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
    w_row, up_row = tile * BLOCK_OUT, out_features + tile * BLOCK_OUT
    w_tiles = gl.allocate_shared_memory(dtype, [NUM_STAGES, BLOCK_OUT, BLOCK_IN], weight.layout)
    up_tiles = w_tiles
    if IS_GATED:
        up_tiles = gl.allocate_shared_memory(dtype, [NUM_STAGES, BLOCK_OUT, BLOCK_IN], weight.layout)
    x_tiles = gl.allocate_shared_memory(dtype, [NUM_STAGES, BLOCK_ROWS, BLOCK_IN], x.layout)
    filled = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(filled.index(i), count=1)

    for i in gl.static_range(NUM_STAGES):
        is_tile = i < num_tiles
        at = start + i * BLOCK_IN
        mbarrier.expect(filled.index(i), num_bytes, pred=is_tile)
        _copy(weight, [w_row, at], filled.index(i), w_tiles.index(i), pred=is_tile)
        if IS_GATED:
            _copy(weight, [up_row, at], filled.index(i), up_tiles.index(i), pred=is_tile)
    if PDL:
        gdc_wait()
    for i in gl.static_range(NUM_STAGES):
        is_tile = i < num_tiles
        _copy(x, [0, start + i * BLOCK_IN], filled.index(i), x_tiles.index(i), pred=is_tile)

    sums = gl.zeros([BLOCK_OUT, BLOCK_ROWS], sums_dtype, multiplied)
    up_sums = gl.zeros([BLOCK_OUT, BLOCK_ROWS], sums_dtype, multiplied)
    stage, phase, last_stage = 0, 0, NUM_STAGES - 1
    for i in range(num_tiles):
        mbarrier.wait(filled.index(stage), phase)
        x_tile = x_tiles.index(stage).permute((1, 0))
        sums = warpgroup_mma(w_tiles.index(stage), x_tile, sums, is_async=True)
        if IS_GATED:
            up_sums = warpgroup_mma(up_tiles.index(stage), x_tile, up_sums, is_async=True)
            sums, up_sums = warpgroup_mma_wait(2, deps=[sums, up_sums])
        else:
            sums = warpgroup_mma_wait(1, deps=[sums])
        # The products of the tile before have ended: its stage gets the tile that follows those in flight.
        is_tile = (i > 0) & (i - 1 + NUM_STAGES < num_tiles)
        at = start + (i - 1 + NUM_STAGES) * BLOCK_IN
        free = filled.index(last_stage)
        mbarrier.expect(free, num_bytes, pred=is_tile)
        _copy(weight, [w_row, at], free, w_tiles.index(last_stage), pred=is_tile)
        if IS_GATED:
            _copy(weight, [up_row, at], free, up_tiles.index(last_stage), pred=is_tile)
        _copy(x, [0, at], free, x_tiles.index(last_stage), pred=is_tile)
        last_stage = stage
        phase = gl.where(stage == NUM_STAGES - 1, phase ^ 1, phase)
        stage = gl.where(stage == NUM_STAGES - 1, 0, stage + 1)
    if IS_GATED:
        sums, up_sums = warpgroup_mma_wait(0, deps=[sums, up_sums])
    else:
        sums = warpgroup_mma_wait(0, deps=[sums])
    for i in gl.static_range(NUM_STAGES):
        mbarrier.invalidate(filled.index(i))

    rows = gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(0, written))
    is_row = rows < num_rows
    own_features = gl.arange(0, BLOCK_OUT, layout=gl.SliceLayout(1, written))
    features = tile * BLOCK_OUT + own_features
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
        write_features(
            out, sums, up_sums, bias, residual, features, rows, is_row, out_features, out_stride,
            ACTIVATION, IS_GATED, DTYPE,
        )  # fmt: skip


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
