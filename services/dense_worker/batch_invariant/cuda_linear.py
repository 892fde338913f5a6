"""`BatchInvariantLinear`: all products of linear layers on CUDA by `triton_products`, whatever the number of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from services.dense_worker.batch_invariant.triton_products import MOST_SPLIT_SUMS, ROW_BUCKETS, multiply_rows
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.kernels.linear.linear_choice import LinearChoice, LinearKernel
from services.dense_worker.kernels.linear.quantized.quantized_gemv import codes_form
from services.dense_worker.kernels.linear.quantized.scaled_weight import ScaledWeight
from services.dense_worker.kernels.linear.quantized.triton_prepare import prepare_input
from services.dense_worker.kernels.linear.triton_tiles import SPLIT_AREA, SplitWorkspace
from services.dense_worker.kernels.norm.norm import Norm, RmsNorm, SplitNorm
from services.dense_worker.kernels.triton_launch import KernelLauncher

if TYPE_CHECKING:
    from services.dense_worker.kernels.lora.cuda_lora import CudaLora


class BatchInvariantLinear:
    """Stands in for `CudaLinear`. Every layer has the kernel that `CudaLinear` calls streamed, for any number of rows.

    For one stream, on which the kernels share a workspace. `check_batch_invariance` has refused other formats.

    With adapters no product is fused with the norm before it or the activation after it, in no step: a row without an
    adapter must not depend on whether another row has one.
    """

    matmuls = None  # no product is cuBLAS's
    compiled_rows = ROW_BUCKETS  # numbers of rows that together have all kernels

    def __init__(
        self, launcher: KernelLauncher, device: torch.device, dtype: torch.dtype, lora: CudaLora | None
    ) -> None:
        self.choice = LinearChoice()  # of nothing
        self._launcher, self._dtype, self._lora = launcher, dtype, lora
        self._splits = SplitWorkspace(device, launcher.num_sms * MOST_SPLIT_SUMS // SPLIT_AREA)

    def kernel(self, linear: Linear, num_rows: int) -> LinearKernel:
        """The only one."""
        return LinearKernel.STREAMED

    def can_stream(self, linear: Linear) -> bool:
        """False: there is nothing to choose from."""
        return False

    def can_tile(self, linear: Linear) -> bool:
        """False, as `can_stream`."""
        return False

    def kernels_of(self, linear: Linear) -> dict[str, str]:
        """What multiplies a layer, for the log."""
        return {"any_rows": "batch-invariant"}

    def fuses_activation_after(
        self, kernel: LinearKernel, linear: Linear, num_rows: int, activation: MlpActivation
    ) -> bool:
        """Always, but with adapters, whose deltas come before the activation."""
        return self._lora is None

    def adds_residual(self, kernel: LinearKernel, linear: Linear, num_rows: int) -> bool:
        """Always."""
        return True

    def fuses_norm(self, kernel: LinearKernel, linear: Linear, norm: Norm, num_rows: int, *, has_delta: bool) -> bool:
        """What quantizes the input takes the norm before it, but with adapters, which read what is normalised."""
        return self._lora is None and isinstance(linear.weight, ScaledWeight) and isinstance(norm, RmsNorm)

    def splits_norm(self, before: Linear, norm: Norm, after: Linear, num_rows: int) -> bool:
        """Never: norms of all numbers of rows are rounded alike."""
        return False

    def fuses_activation(self, kernel: LinearKernel, linear: Linear, num_rows: int) -> bool:
        """Never: activations are computed after the product before."""
        return False

    def multiply(
        self,
        kernel: LinearKernel,
        linear: Linear,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        norm: Norm | None = None,
        delta: torch.Tensor | None = None,
        activation_before: MlpActivation | None = None,
        activation: MlpActivation | None = None,
        residual: torch.Tensor | None = None,
        norm_after: SplitNorm | None = None,
    ) -> None:
        """Like `CudaLinear.multiply`. With a `residual` the rows' deltas are added to the sum."""
        assert activation_before is None, "activations are computed after the product before"
        assert norm_after is None, "no norm is split"
        weight = linear.weight
        fused = {"activation": activation, "residual": residual}
        if isinstance(weight, ScaledWeight):
            assert norm is None or isinstance(norm, RmsNorm), "no other norm is fused"
            form = codes_form(weight, torch.float8_e4m3fn)
            prepared = prepare_input(self._launcher, x, form, norm, delta=delta)
            assert prepared.scale is not None, "inputs are quantized"
            codes, x_scale, w_scale = prepared.values[0], prepared.scale[0].flatten(), weight.scale.data
        else:
            assert norm is None and delta is None, "the norm has a kernel of its own"
            codes, x_scale, w_scale = x, None, None
        matrix, bias = weight.matrix.data, linear.bias_data
        multiply_rows(self._launcher, codes, x_scale, matrix, w_scale, bias, out, self._dtype, self._splits, **fused)
        if self._lora is not None and self._lora.is_active:
            assert norm is None and activation is None, "an adapter's delta is of the plain product"
            self._lora.add(linear, x, out)
