"""`CudaLinear`: every product of a linear layer on CUDA, by the kernel chosen for its format and number of rows.

Products that are neither streamed nor tiled are those of torch's matrix products of codes, or of the format's reference
(of `PlainWeight`: cuBLAS). A new format gets its kernels in a file such as `plain_gemv.py` and an entry in the
table here. An adapter's delta joins in `multiply`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.gated_product import GatedProduct
from services.dense_worker.kernels.linear.linear import Linear, PlainWeight
from services.dense_worker.kernels.linear.linear_choice import ROW_BUCKETS, LinearChoice, LinearKernel
from services.dense_worker.kernels.linear.matmul_choice import MatmulChoice
from services.dense_worker.kernels.linear.plain_gemv import PlainGemv
from services.dense_worker.kernels.linear.quantized.dequantized_matmul import DequantizedMatmul
from services.dense_worker.kernels.linear.quantized.operands import InputForm
from services.dense_worker.kernels.linear.quantized.quantized_gemv import gemv_by_format
from services.dense_worker.kernels.linear.quantized.scaled_matmul import ScaledMatmul
from services.dense_worker.kernels.linear.quantized.scaled_weight import ScaledWeight
from services.dense_worker.kernels.linear.quantized.tiled_matmul import TiledMatmul
from services.dense_worker.kernels.norm.norm import Norm, RmsNorm, SplitNorm
from services.dense_worker.kernels.triton_launch import KernelLauncher

if TYPE_CHECKING:
    from services.dense_worker.kernels.lora.cuda_lora import CudaLora


_ADDED_FROM_ROWS = 1024  # by cuBLAS; below, it gains nothing, and `MatmulChoice` has the faster product


class StreamingKernels(Protocol):
    """Kernels for one format and up to `linear_choice.ROW_BUCKETS[-1]` rows; their time is that of reading weights."""

    def can_multiply(self, linear: Linear) -> bool:
        """Whether the kernels support this layer's dtype and shape, and the GPU."""

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
        """Like `CudaLinear.multiply`; with norms where `CudaLinear.fuses_norm` or `splits_norm` says so."""


class CudaLinear:
    """Multiplies linear layers on one stream, on which the kernels share their workspaces."""

    def __init__(
        self,
        launcher: KernelLauncher,
        device: torch.device,
        dtype: torch.dtype,  # the model's
        lora: CudaLora | None = None,
    ) -> None:
        self.choice = LinearChoice()
        self.matmuls = MatmulChoice(device)  # of plain layers that are not streamed
        self._lora = lora  # None: no row has an adapter
        self._quantized = gemv_by_format(launcher, device, dtype)
        self._streaming: dict[type, StreamingKernels] = {
            PlainWeight: PlainGemv(launcher, device),
            **self._quantized,
        }
        self._codes = ScaledMatmul(launcher, device, dtype)
        self._values = DequantizedMatmul(launcher, dtype)
        self._tiles = TiledMatmul(launcher, device, dtype)
        self._gated = GatedProduct(launcher, device)
        # Numbers of rows that have kernels of their own besides those of `choice`.
        self.compiled_rows: tuple[int, ...] = self._gated.compiled_rows

    @property
    def adds_deltas(self) -> bool:
        """Whether rows of the step have adapters. Then no product may be fused with the whole norm before it."""
        return self._lora is not None and self._lora.is_active

    def kernel(self, linear: Linear, num_rows: int) -> LinearKernel:
        """The choice for this layer and number of rows. With adapters it is streamed wherever that adds the deltas."""
        return LinearKernel.STREAMED if self._fuses_deltas(linear, num_rows) else self.choice.kernel(linear, num_rows)

    def fuses_activation_after(
        self, kernel: LinearKernel, linear: Linear, num_rows: int, activation: MlpActivation
    ) -> bool:
        """Whether `multiply` computes the activation of the product."""
        if kernel is LinearKernel.CUBLAS:
            return not self.adds_deltas and self._gated.can_multiply(linear, num_rows, activation)
        return kernel is LinearKernel.STREAMED and (not self.adds_deltas or self._fuses_deltas(linear, num_rows))

    def adds_residual(self, kernel: LinearKernel, linear: Linear, num_rows: int) -> bool:
        """Whether `multiply` adds a residual to the product."""
        if kernel is LinearKernel.CUBLAS and num_rows >= _ADDED_FROM_ROWS:
            return isinstance(linear.weight, PlainWeight) and linear.bias is None
        return kernel is LinearKernel.STREAMED

    def can_stream(self, linear: Linear) -> bool:
        """Whether there are streaming kernels for this layer; otherwise they must not be chosen."""
        kernels = self._streaming.get(type(linear.weight))
        return kernels is not None and kernels.can_multiply(linear)

    def can_tile(self, linear: Linear) -> bool:
        """Whether there is a kernel of tiles for this layer; otherwise it must not be chosen."""
        return self._tiles.can_multiply(linear)

    def fuses_norm(self, kernel: LinearKernel, linear: Linear, norm: Norm, num_rows: int, *, has_delta: bool) -> bool:
        """Whether `multiply` takes the norm before this product, and if `has_delta` the addition before the norm."""
        if self.adds_deltas:
            return False
        if kernel is LinearKernel.STREAMED and isinstance(linear.weight, PlainWeight):
            return not has_delta and num_rows == 1
        if not isinstance(norm, RmsNorm):
            return False
        if kernel is LinearKernel.STREAMED:
            return not has_delta
        form = self._prepared_form(kernel, linear, num_rows)
        return form is not None and not (has_delta and form.order is not None)

    def splits_norm(self, before: Linear, norm: Norm, after: Linear, num_rows: int) -> bool:
        """Whether the product before a norm computes its first half, and the one after it the second.

        Rows that are not yet divided by their root mean square may be beyond the range of float16.
        """
        if not isinstance(norm, RmsNorm) or not 1 < num_rows <= ROW_BUCKETS[-1]:
            return False
        return all(
            linear.weight.kind == torch.bfloat16
            and self.kernel(linear, num_rows) is LinearKernel.STREAMED
            and (not self.adds_deltas or self._fuses_deltas(linear, num_rows))
            for linear in (before, after)
        )

    def fuses_activation(self, kernel: LinearKernel, linear: Linear, num_rows: int) -> bool:
        """Whether `multiply` takes rows of which it computes the activation before the product."""
        is_unfused = kernel is not LinearKernel.STREAMED and not self.adds_deltas
        return is_unfused and self._prepared_form(kernel, linear, num_rows) is not None

    def kernels_of(self, linear: Linear) -> dict[str, str]:
        """What multiplies a quantized layer with few rows, more and many, and why another kernel does; for the log."""
        kernels = self._quantized.get(type(linear.weight))
        few = "the format has no kernels" if kernels is None else kernels.why_not(linear)
        tiled = self._tiles.why_not(linear)
        is_scaled = isinstance(linear.weight, ScaledWeight)
        if kernels is not None and self._values.can_multiply(linear):
            many = "dequantized by a kernel, then cuBLAS"
        else:
            why_not = self._codes.why_not(linear) if is_scaled else "the format has no product of codes"
            many = "product of codes" if why_not is None else f"reference: {why_not}"
        return {
            "few_rows": "streamed, or as many rows" if few is None else f"as many rows: {few}",
            "more_rows": "tiled, or as many rows" if tiled is None else f"as many rows: {tiled}",
            "many_rows": many,
        }

    def multiply(
        self,
        kernel: LinearKernel,
        linear: Linear,
        x: torch.Tensor,  # [n, in_features]
        out: torch.Tensor,  # [n, out_features], half of them with a gated activation; x's dtype, or float32
        *,
        norm: Norm | SplitNorm | None = None,  # x is first normalised; only where `fuses_norm`, or `splits_norm`
        delta: torch.Tensor | None = None,  # [n, in_features]: before the norm it is added to x in place
        activation_before: MlpActivation | None = None,  # of x; only where `fuses_activation`
        activation: MlpActivation | None = None,  # of the product; only where `fuses_activation_after`
        residual: torch.Tensor | None = None,  # [n, out_features]: added; may be `out`; only where `adds_residual`
        norm_after: SplitNorm | None = None,  # of the sum with `residual`; only where `splits_norm`
    ) -> None:
        """out = W x + b, with the fused operations. `kernel` is the choice for this layer and number of rows.

        If rows have adapters, their deltas are added.
        """
        if self._fuses_deltas(linear, len(x)):
            is_plain = delta is None and activation_before is None
            assert is_plain and (norm is None or isinstance(norm, SplitNorm)), "the kernel fuses only halves of norms"
            self._lora.multiply(linear, x, out, activation, residual, norm, norm_after)
            return
        if kernel is LinearKernel.STREAMED:
            assert delta is None and activation_before is None, "no streaming kernel fuses them"
            self._streaming[type(linear.weight)].multiply(linear, x, out, norm, activation, residual, norm_after)
        elif activation is not None:
            assert residual is None, "a gated product is added to nothing"
            self._gated.multiply(linear, x, out, activation)
        elif residual is not None:
            torch.addmm(residual, x, linear.weight.matrix.data.t(), out=out)
        else:
            self._multiply_unfused(kernel, linear, x, out, norm=norm, delta=delta, activation=activation_before)
        if self._lora is not None and self._lora.is_active:
            assert norm is None and activation is None, "an adapter's delta is of the plain product"
            self._lora.add(linear, x, out)

    def _fuses_deltas(self, linear: Linear, num_rows: int) -> bool:
        """Whether one kernel computes the product with the deltas of the rows' adapters."""
        return self._lora is not None and self._lora.is_active and self._lora.fuses(linear, num_rows)

    def _many_rows(
        self, kernel: LinearKernel, linear: Linear, num_rows: int
    ) -> ScaledMatmul | DequantizedMatmul | TiledMatmul | None:
        """What multiplies a layer that is not streamed; None: the format's reference."""
        if kernel is LinearKernel.TILED:
            return self._tiles
        if isinstance(linear.weight, ScaledWeight) and self._codes.can_multiply(linear, num_rows):
            return self._codes
        is_quantized = type(linear.weight) in self._quantized
        return self._values if is_quantized and self._values.can_multiply(linear) else None

    def _prepared_form(self, kernel: LinearKernel, linear: Linear, num_rows: int) -> InputForm | None:
        """The form in which a kernel prepares the input of a product that is not streamed; None: it needs none."""
        products = self._many_rows(kernel, linear, num_rows)
        form = None if products is None else products.input_form(linear)
        return None if form is None or form.is_any else form

    def _multiply_unfused(
        self, kernel: LinearKernel, linear: Linear, x: torch.Tensor, out: torch.Tensor, **before: Any
    ) -> None:
        products = self._many_rows(kernel, linear, len(x))
        is_plain = before["norm"] is None and before["activation"] is None
        assert is_plain or self._prepared_form(kernel, linear, len(x)) is not None, "no kernel prepares the input"
        if products is not None:
            products.multiply(linear, x, out, **before)
        elif out.dtype != x.dtype:
            out.copy_(linear.weight.multiply(x, linear.bias_data))
        elif not self._multiply_chosen(linear, x, out):
            linear.weight.multiply(x, linear.bias_data, out)

    def _multiply_chosen(self, linear: Linear, x: torch.Tensor, out: torch.Tensor) -> bool:
        """Whether a candidate has been chosen for this product, and has computed it."""
        is_plain = isinstance(linear.weight, PlainWeight) and linear.bias_data is None
        return is_plain and self.matmuls.multiply(x, linear.weight.matrix.data, out)
