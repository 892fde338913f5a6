"""The streaming kernels of `PlainWeight`: `triton_gemv` for one row, `triton_skinny` or `rows_product` for more."""

from __future__ import annotations

import torch

from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear import (
    DTYPES_OF_16_BITS,
    MAX_IN_FEATURES,
    TILE_BYTES,
    Linear,
    PlainWeight,
)
from services.dense_worker.kernels.linear.rows_product import RowsProduct
from services.dense_worker.kernels.linear.triton_gemv import gemv
from services.dense_worker.kernels.linear.triton_skinny import skinny_linear
from services.dense_worker.kernels.linear.triton_tiles import SplitWorkspace
from services.dense_worker.kernels.norm.norm import Norm, SplitNorm
from services.dense_worker.kernels.triton_launch import KernelLauncher


def can_stream_plain(launcher: KernelLauncher, linear: Linear) -> bool:
    """Whether a layer has 16-bit weights whose rows fit into registers, and the GPU has Hopper's shared memory."""
    is_known = isinstance(linear.weight, PlainWeight) and linear.weight.kind in DTYPES_OF_16_BITS
    has_room = launcher.shared_memory_bytes >= TILE_BYTES
    return is_known and has_room and linear.in_features <= MAX_IN_FEATURES


class PlainGemv:
    """StreamingKernels, for one stream: they share a workspace for partial sums."""

    def __init__(self, launcher: KernelLauncher, device: torch.device) -> None:
        self._launcher = launcher
        self._splits = SplitWorkspace(device, launcher.num_sms)
        self._rows = RowsProduct(launcher, device)

    def can_multiply(self, linear: Linear) -> bool:
        """Like `can_stream_plain`."""
        return can_stream_plain(self._launcher, linear)

    def multiply(
        self,
        linear: Linear,
        x: torch.Tensor,
        out: torch.Tensor,
        norm: Norm | SplitNorm | None,
        activation: MlpActivation | None,
        residual: torch.Tensor | None,
        norm_after: SplitNorm | None = None,
    ) -> None:
        """Runs the GEMV kernel for one row, with a whole norm, or the skinny kernel for more, with halves of norms."""
        matrix, bias = linear.weight.matrix.data, linear.bias_data
        if len(x) == 1:
            assert not isinstance(norm, SplitNorm) and norm_after is None, "the kernel of one row fuses the whole norm"
            gemv(self._launcher, x, matrix, bias, out, norm=norm, activation=activation, residual=residual)
        else:
            assert norm is None or isinstance(norm, SplitNorm), "only the kernel of one row fuses a whole norm"
            fused = {"activation": activation, "residual": residual, "norm": norm, "norm_after": norm_after}
            shape = self._rows.shape_of(x, matrix, bias, out, **fused)
            if shape is None:
                skinny_linear(self._launcher, x, matrix, bias, out, self._splits, **fused)
            else:
                self._rows.multiply(shape, x, matrix, out, residual, norm, norm_after)
