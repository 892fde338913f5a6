"""The streaming kernels of `PlainWeight`: `triton_gemv` for one row, `triton_skinny` for a few."""

from __future__ import annotations

import torch

from services.dense_worker.backends.triton_gemv import MAX_IN_FEATURES, gemv
from services.dense_worker.backends.triton_launch import KernelLauncher
from services.dense_worker.backends.triton_skinny import SplitWorkspace, skinny_linear
from services.dense_worker.model.linear import Linear
from services.dense_worker.model.norm import RmsNorm

_DTYPES = (torch.bfloat16, torch.float16)
_SHARED_BYTES = 192 << 10  # of the largest tiles, sized for Hopper


class StreamedPlain:
    """StreamingKernels, for one stream: they share a workspace for partial sums."""

    def __init__(self, launcher: KernelLauncher, device: torch.device) -> None:
        self._launcher = launcher
        self._splits = SplitWorkspace(device, launcher.num_sms)

    def can_multiply(self, linear: Linear) -> bool:
        """True for 16-bit weights whose rows fit into registers, on a GPU with Hopper's shared memory."""
        has_room = self._launcher.shared_memory_bytes >= _SHARED_BYTES
        return has_room and linear.weight.kind in _DTYPES and linear.in_features <= MAX_IN_FEATURES

    def multiply(
        self,
        linear: Linear,
        x: torch.Tensor,
        out: torch.Tensor,
        norm: RmsNorm | None,
        is_gated: bool,
        residual: torch.Tensor | None,
    ) -> None:
        """Runs the GEMV kernel for one row, the skinny kernel for more."""
        matrix, bias = linear.weight.matrix.data, linear.bias_data
        if len(x) == 1:
            norm_weight, eps = (None, 0.0) if norm is None else (norm.weight.data, norm.eps)
            fused = {"norm_weight": norm_weight, "eps": eps, "is_gated": is_gated, "residual": residual}
            gemv(self._launcher, x, matrix, bias, out, **fused)
        else:
            assert norm is None, "only the kernel of one row fuses the norm"
            skinny_linear(
                self._launcher, x, matrix, bias, out, self._splits, is_gated=is_gated, residual=residual
            )
