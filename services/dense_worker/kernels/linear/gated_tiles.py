"""The first product of a gated MLP with SwiGLU, of many rows in bfloat16 on Hopper, in CUDA C++.

The tiles and copies of `gated_tiles.cu` are those of cuBLAS; gate and up are not written to memory and read again.
Reference: `MlpActivation.apply` of the product.
"""

from __future__ import annotations

import ctypes
import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch

from services.common.errors import DeviceError
from services.dense_worker.kernels.tensor_map import TensorMap, map_of, num_rows_there

if TYPE_CHECKING:
    from services.dense_worker.kernels.cuda_source import CudaKernel
    from services.dense_worker.kernels.triton_launch import KernelLauncher

log = structlog.get_logger()

_TILE_ROWS, WIDTHS = 128, (112, 128)  # widths: features of a tile, each with two rows of weights
_DEPTH, _NUM_STAGES = 64, 4  # in_features of a stage
_STORED = 64, 64  # features and rows that a warpgroup stores at once
_NUM_GROUPS = 2
_NUM_THREADS = _NUM_GROUPS * 128 + 32
_CLUSTER = 2  # programs
_PAIR_ROWS = _CLUSTER * _TILE_ROWS
_FEWEST_ROWS, _LEAST_SHARE_USED = 512, 0.92  # see `choose_width`
_ALIGNMENT = 16  # bytes, of what the copy unit reads and writes


class _Params(ctypes.Structure):
    """The struct `Params` of the source."""

    _fields_ = [
        *((name, TensorMap) for name in ("rows", "weights", "out")),
        *((name, ctypes.c_int) for name in ("num_rows", "in_features", "out_features")),
        ("_padding", ctypes.c_int * 13),  # the source's struct is aligned as its maps are
    ]


class GatedTiles:
    """The kernels, one for each width of tiles, for one stream."""

    def __init__(self, launcher: KernelLauncher, device: torch.device) -> None:
        self._launcher, self._device = launcher, device
        self._kernels: dict[int, CudaKernel] = {}  # by features of a tile
        shared_bytes = max(_shared_bytes(width) for width in WIDTHS)
        self._is_missing = not launcher.is_hopper or launcher.shared_memory_bytes < shared_bytes
        self._is_submitted = False  # to be compiled

    def can_multiply(self, num_rows: int, out_features: int) -> bool:
        """Whether there are kernels, and products of so many rows gain. Kernels that are being compiled are there."""
        if num_rows < _FEWEST_ROWS or not self.can_load():
            return False
        return self._launcher.is_compiling or choose_width(num_rows, out_features, self._launcher.num_sms) is not None

    def can_load(self) -> bool:
        """Loads the kernels, if they are not there. Compiled, or being compiled, they count as loaded."""
        if not (self._kernels or self._is_missing or self._launcher.is_compiling):
            from services.dense_worker.kernels.cuda_source import CudaKernel

            try:
                for width in WIDTHS:
                    binary = self._compiled(width)
                    self._kernels[width] = CudaKernel(binary, "gated_tiles", _NUM_THREADS, _shared_bytes(width))
            except DeviceError as error:
                log.warning("no gated product in CUDA C++", reason=str(error))
                self._is_missing = True
        return not self._is_missing

    def multiply(
        self,
        x: torch.Tensor,  # bfloat16 [n, in_features]
        gate_up: torch.Tensor,  # bfloat16 [2 * out_features, in_features]: gate, then up
        out: torch.Tensor,  # bfloat16 [n, out_features]; rows of all begin at multiples of 16 bytes
        width: int | None = None,  # of tiles; None: as is best
    ) -> None:
        """out = silu(gate) * up, where `can_load`; both are rounded before that, as separate kernels would."""
        if self._launcher.is_compiling:
            if not self._is_submitted:
                self._is_submitted = True
                for each in WIDTHS:
                    self._launcher.submit(partial(self._compiled, each))
            return
        (num_rows, in_features), out_features = x.shape, out.shape[1]
        width = width or choose_width(num_rows, out_features, self._launcher.num_sms)
        assert width is not None, "`can_multiply` has found a width"
        places = [place for each in (x, gate_up, out) for place in (each.data_ptr(), each.stride(0) * each.itemsize)]
        assert not any(place % _ALIGNMENT for place in places), "rows begin at multiples of 16 bytes"
        x_sizes = in_features, num_rows_there(x, -(-num_rows // _PAIR_ROWS) * _PAIR_ROWS)
        params = _Params()
        params.rows = map_of(x, x_sizes, (x.stride(0) * x.itemsize,), (_DEPTH, _TILE_ROWS))
        row_bytes = gate_up.stride(0) * gate_up.itemsize
        params.weights = map_of(gate_up, (in_features, 2 * out_features), (row_bytes,), (_DEPTH, width))
        params.out = map_of(out, (out_features, num_rows), (out.stride(0) * out.itemsize,), _STORED)
        params.num_rows, params.in_features, params.out_features = num_rows, in_features, out_features
        self._kernels[width](self._launcher.num_sms // _CLUSTER * _CLUSTER, params)

    def _compiled(self, width: int) -> bytes:
        from services.dense_worker.kernels.cuda_source import compiled

        sizes = {"TILE_FEATURES": width, "NUM_STAGES": _NUM_STAGES}
        return compiled(Path(__file__).with_name("gated_tiles.cu"), sizes, self._device)


def choose_width(num_rows: int, out_features: int, num_sms: int) -> int | None:
    """Of tiles, so that programs have about as many, full ones; None: cuBLAS is as fast."""
    shares = {width: _share_used(num_rows, out_features, width, num_sms) for width in WIDTHS}
    best = max(WIDTHS, key=lambda width: shares[width])
    return best if shares[best] >= _LEAST_SHARE_USED else None


def _share_used(num_rows: int, out_features: int, width: int, num_sms: int) -> float:
    """What rows and features are of all tiles that the programs could compute in the time of those that have most."""
    num_clusters = num_sms // _CLUSTER
    num_rounds = -(-(-(-num_rows // _PAIR_ROWS) * -(-out_features // width)) // num_clusters)
    return num_rows * out_features / (num_rounds * num_clusters * _PAIR_ROWS * width)


def _shared_bytes(width: int) -> int:
    stage_bytes = (_TILE_ROWS + 2 * width) * 2 * _DEPTH
    return _NUM_STAGES * (stage_bytes + 16) + _NUM_GROUPS * 2 * math.prod(_STORED)
