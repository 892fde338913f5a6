"""Products of 2 to 64 rows with weights in bfloat16 or FP8 on Hopper, in CUDA C++ (`rows_product.cu`).

What more rows cost in `triton_skinny` is what comes after the products. Here programs that split in_features exchange
their sums through the shared memory of a cluster, and a thread that only copies runs ahead of those that multiply.
Reference: `skinny_linear`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch

from services.common.errors import DeviceError
from services.common.families.shape import Activation
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear_choice import ROW_BUCKETS
from services.dense_worker.kernels.lora.tensors import RowDeltas
from services.dense_worker.kernels.norm.norm import SplitNorm, num_squares
from services.dense_worker.kernels.tensor_map import TensorMap, map_of, num_rows_there

if TYPE_CHECKING:
    from services.dense_worker.kernels.cuda_source import CudaKernel
    from services.dense_worker.kernels.linear.quantized.operands import CodeScales
    from services.dense_worker.kernels.triton_launch import KernelLauncher

log = structlog.get_logger()

_MIN_ROWS = 2
_ROW_COUNTS = (8, 16, 24, 32, 48, ROW_BUCKETS[-1])  # of the kernels: steps of the tensor cores
_GROUP = 8  # features, which programs share out
_GROUPS = range(6, 33)  # that a program or a cluster may have; more have no room in registers
_GATED_GROUPS = range(6, 17)
_CLUSTER = 2  # programs that split in_features
_NUM_THREADS, _NUM_SHRINKING = 192, 128  # the latter: for x A^T
_PART_STEP = 512  # in_features, which the latter threads read together
_ALIGNMENT = 16  # bytes, of what the copy unit reads and threads write
_TILE_BYTES = 128  # of in_features
# Of an SM's shared memory, for the kernels that wait for flags, which take 1 KB each: without it the program of one SM
# begins only when another one's has ended.
_SPARE_BYTES = 4 << 10
MAX_PROJECTIONS = 4  # whose deltas a product may have


@dataclass(frozen=True, slots=True)
class RowsShape:
    """What a kernel is compiled for."""

    kind: int  # as the source's
    num_groups: int  # of a program, or of a cluster
    num_programs: int
    is_fp8: bool = False


_PLAIN, _GATED, _SPLIT = range(3)


class _Params(ctypes.Structure):
    """The struct `Params` of the source."""

    _fields_ = [
        *((name, TensorMap) for name in ("weights", "last_group", "rows")),
        *((name, ctypes.c_void_p) for name in ("squares", "residual", "gain", "out", "weighted", "squares_after")),
        *((name, ctypes.c_void_p) for name in ("row_scales", "weight_scales")),
        *((name, ctypes.c_uint32) for name in ("num_rows", "num_groups", "in_features", "out_stride")),
        *((name, ctypes.c_uint32) for name in ("residual_stride", "num_squares", "num_squares_after")),
        ("eps", ctypes.c_float),
        ("_padding", ctypes.c_uint64 * 4),  # the source's struct is aligned as its maps are
    ]


class _ParamsWithDeltas(_Params):
    """The same where the source has deltas."""

    _fields_ = [
        *(("b", TensorMap * MAX_PROJECTIONS), ("hidden", TensorMap)),
        *((name, ctypes.c_void_p) for name in ("ranks", "row_slots", "counter", "a", "x")),
        *((name, ctypes.c_void_p) for name in ("parts", "num_parts_done", "shrunk")),
        *((name, ctypes.c_uint32) for name in ("num_projections", "group_size", "num_tiles")),
        ("first_features", ctypes.c_uint32 * MAX_PROJECTIONS),
        *((name, ctypes.c_uint32) for name in ("x_stride", "shrunk_stride", "num_parts", "part_columns")),
        ("_padding_behind", ctypes.c_uint32 * 5),
    ]


class RowsProduct:
    """The kernels of all shapes, for one stream."""

    def __init__(self, launcher: KernelLauncher, device: torch.device, *, has_deltas: bool = False) -> None:
        self._launcher, self._device, self._has_deltas = launcher, device, has_deltas
        self._shared_bytes = launcher.shared_memory_bytes - _SPARE_BYTES
        self._kernels: dict[RowsShape, dict[int, CudaKernel] | None] = {}  # by number of rows; None: there are none
        self._submitted: set[RowsShape] = set()  # to be compiled

    def shape_of(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        activation: MlpActivation | None,
        residual: torch.Tensor | None,
        norm: SplitNorm | None,
        norm_after: SplitNorm | None,
        scales: CodeScales | None = None,
    ) -> RowsShape | None:
        """The kernel for such a product; None: `skinny_linear` computes it."""
        if not self._launcher.is_hopper or not _MIN_ROWS <= len(x) <= _ROW_COUNTS[-1] or bias is not None:
            return None
        dtype = torch.bfloat16 if scales is None else torch.float8_e4m3fn
        if not x.dtype == weight.dtype == dtype or out.dtype != torch.bfloat16:
            return None
        is_silu = activation is None or (activation.is_gated and activation.function is Activation.SILU)
        is_added = residual is not None or norm_after is not None
        if not is_silu or (is_added and (activation is not None or norm is not None)):
            return None
        tensors = [tensor for tensor in (x, weight, out, residual) if tensor is not None]
        places = [place for tensor in tensors for place in (tensor.data_ptr(), tensor.stride(0) * tensor.itemsize)]
        if norm_after is not None:
            places += [norm_after.weight.data_ptr(), norm_after.rows.data_ptr()]
        if scales is not None:
            if scales.dtype != torch.bfloat16 or norm is not None or norm_after is not None:
                return None
            places.append(scales.weights.data_ptr())
        if any(place % _ALIGNMENT for place in places):
            return None
        is_gated = activation is not None
        shape = choose_rows_shape(out.shape[1], self._launcher.num_sms, is_gated=is_gated, is_added=is_added)
        if shape is not None and scales is not None:
            shape = replace(shape, is_fp8=True)
        return shape if shape is not None and self._can_load(shape) else None

    def multiply(
        self,
        shape: RowsShape,  # of `shape_of`
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None,
        norm: SplitNorm | None,
        norm_after: SplitNorm | None,
        deltas: RowDeltas | None = None,
        scales: CodeScales | None = None,
    ) -> None:
        """As `skinny_linear`, with one of the kernels that `shape_of` has loaded; `deltas`, if these have them."""
        assert (deltas is not None) is self._has_deltas, "kernels have deltas or not"
        if self._launcher.is_compiling:
            if shape not in self._submitted:
                self._submitted.add(shape)
                self._launcher.submit(lambda: self._compiled(shape))
            return
        kernels = self._kernels[shape]
        assert kernels is not None, "`shape_of` has found kernels"
        (num_rows, in_features), num_features = x.shape, out.shape[1]
        block_rows = next(count for count in kernels if count >= num_rows)
        params = _Params() if deltas is None else _ParamsWithDeltas()
        _set_maps(params, shape, block_rows, x, weight, num_features)
        params.num_rows, params.num_groups, params.in_features = num_rows, num_features // _GROUP, in_features
        params.out, params.out_stride = out.data_ptr(), out.stride(0)
        if residual is not None:
            params.residual, params.residual_stride = residual.data_ptr(), residual.stride(0)
        if norm is not None:
            params.squares, params.num_squares, params.eps = norm.squares.data_ptr(), norm.squares.shape[1], norm.eps
        if norm_after is not None:
            params.gain, params.weighted = norm_after.weight.data_ptr(), norm_after.rows.data_ptr()
            params.squares_after, params.num_squares_after = norm_after.squares.data_ptr(), norm_after.squares.shape[1]
        if scales is not None:
            params.row_scales, params.weight_scales = scales.rows.data_ptr(), scales.weights.data_ptr()
        if isinstance(params, _ParamsWithDeltas) and deltas is not None:
            _set_deltas(params, shape, block_rows, x, deltas, num_features)
        kernels[block_rows](shape.num_programs, params)

    def _can_load(self, shape: RowsShape) -> bool:
        """Loads the kernels of a shape, if they are not there. Compiled, or being compiled, they count as loaded."""
        if shape not in self._kernels and not self._launcher.is_compiling:
            try:
                self._kernels[shape] = self._loaded(shape)
            except DeviceError as error:
                log.warning("no product in CUDA C++", shape=shape, reason=str(error))
                self._kernels[shape] = None
        return self._kernels.get(shape, {}) is not None

    def _loaded(self, shape: RowsShape) -> dict[int, CudaKernel]:
        from services.dense_worker.kernels.cuda_source import CudaKernel

        binary = self._compiled(shape)
        names = {count: f"rows_product_{count}" for count in _ROW_COUNTS}
        num_threads = _NUM_THREADS + (_NUM_SHRINKING if self._has_deltas else 0)
        return {count: CudaKernel(binary, name, num_threads, self._shared_bytes) for count, name in names.items()}

    def _compiled(self, shape: RowsShape) -> bytes:
        from services.dense_worker.kernels.cuda_source import compiled

        sizes = {"KIND": shape.kind, "GROUPS": shape.num_groups, "SHARED_BYTES": self._shared_bytes}
        constants = sizes | {"IS_FP8": int(shape.is_fp8), "HAS_DELTAS": int(self._has_deltas)}
        return compiled(Path(__file__).with_name("rows_product.cu"), constants, self._device)


def choose_rows_shape(out_features: int, num_sms: int, *, is_gated: bool, is_added: bool) -> RowsShape | None:
    """One program for each SM; None: it would have too few features, or too many."""
    kind = _SPLIT if is_added else _GATED if is_gated else _PLAIN
    num_all, num_parts = out_features // _GROUP, num_sms // _num_splits(kind)
    num_groups = -(-num_all // num_parts)
    if out_features % _GROUP or num_groups not in (_GATED_GROUPS if is_gated else _GROUPS):
        return None
    if is_added:
        num_parts = -(-num_all // num_groups)  # each has a column of a norm's squares
        if num_parts > num_squares(out_features):
            return None
    return RowsShape(kind, num_groups, num_parts * _num_splits(kind))


def num_parts(num_tiles: int, in_features: int, num_programs: int) -> int:
    """Parts of in_features, each of which a program sums for one of the tiles of A."""
    num_steps = -(-in_features // _PART_STEP)
    most = max(1, min(num_programs // num_tiles, num_steps))
    return -(-num_steps // -(-num_steps // most))


def part_columns(in_features: int, num_parts: int) -> int:
    """in_features of each part; the last one may have fewer."""
    return -(-in_features // (_PART_STEP * num_parts)) * _PART_STEP


def _num_splits(kind: int) -> int:
    """Parts of in_features."""
    return _CLUSTER if kind == _SPLIT else 1


def _set_maps(
    params: _Params, shape: RowsShape, block_rows: int, x: torch.Tensor, weight: torch.Tensor, num_features: int
) -> None:
    """Of boxes of 128 bytes of in_features. Those of gate and up together have 8 features of each in turn."""
    in_features, row_bytes = weight.shape[1], weight.stride(0) * weight.itemsize
    width = _TILE_BYTES // weight.itemsize
    num_parts = shape.num_programs // _num_splits(shape.kind)
    num_together = shape.num_groups - bool(num_features // _GROUP % num_parts)
    for name, num_groups in (("weights", num_together), ("last_group", 1)):
        if shape.kind == _GATED:
            sizes = in_features, _GROUP, 2, num_features // _GROUP
            strides, box = (row_bytes, num_features * row_bytes, _GROUP * row_bytes), (width, _GROUP, 2, num_groups)
        else:
            sizes, strides, box = (in_features, num_features), (row_bytes,), (width, _GROUP * num_groups)
        setattr(params, name, map_of(weight, sizes, strides, box))
    x_sizes = in_features, num_rows_there(x, block_rows)
    params.rows = map_of(x, x_sizes, (x.stride(0) * x.itemsize,), (width, block_rows))


def _set_deltas(
    params: _ParamsWithDeltas,
    shape: RowsShape,
    block_rows: int,
    x: torch.Tensor,
    deltas: RowDeltas,
    num_features: int,
) -> None:
    """Maps of B by projection, in boxes of 64 ranks and a program's features. Beyond its features there are zeros."""
    width = _TILE_BYTES // deltas.b.itemsize
    num_ranks, row_bytes = deltas.b.shape[1], deltas.b.stride(0) * deltas.b.itemsize
    ends = *deltas.first_features[1:], len(deltas.b)
    for index, (first, end) in enumerate(zip(deltas.first_features, ends, strict=True)):
        if shape.kind == _GATED:  # the other half of the box is beyond
            sizes = num_ranks, _GROUP, 1, num_features // _GROUP
            strides = row_bytes, num_features * row_bytes, _GROUP * row_bytes
            params.b[index] = map_of(deltas.b[first:end], sizes, strides, (width, _GROUP, 2, shape.num_groups))
        else:
            box = width, _GROUP * shape.num_groups
            params.b[index] = map_of(deltas.b[first:end], (num_ranks, end - first), (row_bytes,), box)
        params.first_features[index] = first
    hidden = deltas.hidden.flatten(0, 1)
    hidden_bytes = hidden.stride(0) * hidden.itemsize
    params.hidden = map_of(hidden, (hidden.shape[1], len(hidden)), (hidden_bytes,), (width, block_rows))
    params.ranks, params.row_slots = deltas.ranks.data_ptr(), deltas.row_slots.data_ptr()
    params.a, params.x, params.x_stride = deltas.a.data_ptr(), x.data_ptr(), x.stride(0)
    params.parts, params.num_parts_done = deltas.sums.data_ptr(), deltas.num_parts_done.data_ptr()
    params.counter, params.num_tiles = deltas.counters.data_ptr(), deltas.num_tiles
    params.shrunk, params.shrunk_stride = hidden.data_ptr(), hidden.stride(0)
    params.num_parts = num_parts(deltas.num_tiles, x.shape[1], shape.num_programs)
    params.part_columns = part_columns(x.shape[1], params.num_parts)
    params.num_projections, params.group_size = len(deltas.first_features), deltas.group_size
