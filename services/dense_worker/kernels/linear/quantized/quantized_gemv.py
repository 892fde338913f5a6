"""The streaming kernels of the quantized formats: an input prepared by `triton_prepare`, and one product for all."""

from __future__ import annotations

from itertools import accumulate
from typing import Protocol

import torch

from services.common.quantization.schemes import Activations, Element
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear import (
    DTYPES_OF_16_BITS,
    MAX_IN_FEATURES,
    TILE_BYTES,
    Linear,
    WeightFormat,
)
from services.dense_worker.kernels.linear.quantized.block_fp8_weight import BlockFp8Weight
from services.dense_worker.kernels.linear.quantized.grouped_int_weight import GroupedIntWeight
from services.dense_worker.kernels.linear.quantized.mxfp4_weight import GROUP_SIZE, Mxfp4Weight
from services.dense_worker.kernels.linear.quantized.operands import (
    BLOCK_OUT,
    Codes,
    CodeScales,
    InputForm,
    PreparedInput,
    QuantizedMatrix,
    largest_power_of_2,
)
from services.dense_worker.kernels.linear.quantized.scaled_weight import ScaledWeight
from services.dense_worker.kernels.linear.quantized.triton_gemv_quantized import can_gemv, gemv_quantized
from services.dense_worker.kernels.linear.quantized.triton_prepare import prepare_input
from services.dense_worker.kernels.linear.quantized.triton_skinny_quantized import PROGRAMS_PER_SM, skinny_quantized
from services.dense_worker.kernels.linear.rows_product import RowsProduct
from services.dense_worker.kernels.linear.triton_skinny import skinny_linear
from services.dense_worker.kernels.linear.triton_tiles import SplitWorkspace
from services.dense_worker.kernels.norm.norm import Norm, RmsNorm, SplitNorm
from services.dense_worker.kernels.triton_launch import KernelLauncher

_MAX_VERSIONS = 3  # of the input: for q, k and v
_SMALLEST_GROUP = 32  # features, that a product of two codes in a byte fills 16 columns of a tensor core


class QuantizedOperands(Protocol):
    """How the product reads the weights of one format."""

    def why_not(self, weight: WeightFormat) -> str | None:
        """Why the kernels do not support this shape; None if they do."""

    def input_form(self, weight: WeightFormat, dtype: torch.dtype) -> InputForm:
        """The form of the input, for a model in `dtype`."""

    def codes_form(self, weight: WeightFormat) -> InputForm | None:
        """The form of several rows whose codes the tensor cores multiply as such; None: they multiply numbers."""

    def matrix(self, weight: WeightFormat) -> QuantizedMatrix:
        """Views of the weight's tensors."""


def gemv_by_format(
    launcher: KernelLauncher, device: torch.device, dtype: torch.dtype
) -> dict[type, QuantizedGemv]:
    """The kernels of each format, for a model in `dtype`. They share a workspace for partial sums."""
    splits, rows = SplitWorkspace(device, launcher.num_sms * PROGRAMS_PER_SM), RowsProduct(launcher, device)
    return {each: QuantizedGemv(launcher, splits, rows, dtype, operands) for each, operands in OPERANDS.items()}


class QuantizedGemv:
    """StreamingKernels of a quantized format, for one stream."""

    def __init__(
        self,
        launcher: KernelLauncher,
        splits: SplitWorkspace,
        rows: RowsProduct,
        dtype: torch.dtype,
        operands: QuantizedOperands,
    ) -> None:
        self._launcher, self._splits, self._rows = launcher, splits, rows
        self._dtype, self._operands = dtype, operands

    def can_multiply(self, linear: Linear) -> bool:
        """Whether nothing stands against it."""
        return self.why_not(linear) is None

    def why_not(self, linear: Linear) -> str | None:
        """Why the kernels do not support this layer; None if they do."""
        return why_not(self._launcher, linear.weight, linear.in_features, self._dtype)

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
        """One kernel for one row, unless that must be reordered; else one that prepares the rows and the product's."""
        form, matrix = self._operands.input_form(linear.weight, self._dtype), self._operands.matrix(linear.weight)
        fused = {"activation": activation, "residual": residual}
        assert (norm is None or isinstance(norm, RmsNorm)) and norm_after is None, "no other norm is fused"
        if can_gemv(len(x), form, matrix):
            if form.order is not None:
                x, norm = self._in_order(x, form, norm), None
            gemv_quantized(self._launcher, x, form, matrix, linear.bias_data, out, self._dtype, norm=norm, **fused)
            return
        of_codes = self._operands.codes_form(linear.weight)
        if of_codes is None and norm is None and form.is_any:
            prepared = PreparedInput(x[None], None)
        else:
            prepared = prepare_input(self._launcher, x, of_codes or form, norm)
        if of_codes is not None and of_codes.group_size is None:
            assert prepared.scale is not None, "codes have scales"
            scales = CodeScales(prepared.scale.flatten(), matrix.scale, self._dtype)
            codes, weights = prepared.values[0], linear.weight.matrix.data
            shape = self._rows.shape_of(
                codes, weights, linear.bias_data, out, norm=None, norm_after=None, scales=scales, **fused
            )
            if shape is not None:
                self._rows.multiply(shape, codes, weights, out, residual, None, None, scales=scales)
                return
            skinny_linear(self._launcher, codes, weights, linear.bias_data, out, self._splits, scales=scales, **fused)
            return
        skinny_quantized(self._launcher, prepared, matrix, linear.bias_data, out, self._dtype, self._splits, **fused)

    def _in_order(self, x: torch.Tensor, form: InputForm, norm: RmsNorm | None) -> torch.Tensor:
        """The row, normalised, with its features in the order of the matrix's columns."""
        assert form.element is None, "formats with an order do not quantize inputs"
        return prepare_input(self._launcher, x, InputForm(self._dtype, order=form.order), norm).values[0]


def why_not(launcher: KernelLauncher, weight: WeightFormat, in_features: int, dtype: torch.dtype) -> str | None:
    """Why the kernels do not support this weight in a model in `dtype`; None if they do."""
    if dtype not in DTYPES_OF_16_BITS:
        return f"the model's dtype is {dtype}, the kernels need 16 bits"
    if launcher.shared_memory_bytes < TILE_BYTES:  # as before Hopper, which also converts e4m3
        return f"a program has {launcher.shared_memory_bytes} bytes of shared memory, needs {TILE_BYTES}"
    if in_features > MAX_IN_FEATURES:
        return f"in_features is {in_features}, at most {MAX_IN_FEATURES} fit"
    return OPERANDS[type(weight)].why_not(weight)


class ScaledOperands:
    """FP8 or INT8 with a scale for each row; inputs are quantized as the checkpoint says."""

    def why_not(self, weight: ScaledWeight) -> str | None:
        """Projections with scales of inputs of their own must begin with a tile."""
        return _why_no_versions(weight.part_sizes) if weight.activations is Activations.STATIC else None

    def input_form(self, weight: ScaledWeight, dtype: torch.dtype) -> InputForm:
        """Codes as float16, which holds those of both types exactly."""
        return InputForm(dtype) if weight.activations is Activations.NONE else codes_form(weight, torch.float16)

    def codes_form(self, weight: ScaledWeight) -> InputForm | None:
        """Of one input. Sums of FP8 are rounded to about 14 bits on the way, as for many rows."""
        if weight.activations is Activations.NONE:
            return None
        form = codes_form(weight, getattr(torch, weight.element))
        return form if form.num_versions == 1 else None

    def matrix(self, weight: ScaledWeight) -> QuantizedMatrix:
        """A scale for each row."""
        is_fp8 = weight.element is Element.FP8
        matrix = weight.matrix.data.view(torch.uint8) if is_fp8 else weight.matrix.data
        codes = Codes.E4M3 if is_fp8 else Codes.INT8
        return QuantizedMatrix(codes, matrix, weight.scale.data, None, None, 1, weight.part_sizes)


class BlockFp8Operands:
    """FP8 in blocks, with inputs of a scale for each row and block of features."""

    def why_not(self, weight: BlockFp8Weight) -> str | None:
        """Blocks of merged projections must be those of the merged matrix."""
        height, width = weight.block_size
        if width < _SMALLEST_GROUP or width & (width - 1):
            return f"blocks have {width} columns, the kernels need a power of two of at least {_SMALLEST_GROUP}"
        if any(size % height for size in weight.part_sizes[:-1]):
            return f"the projections have {list(weight.part_sizes)} rows, the kernels need multiples of {height}"
        return None

    def input_form(self, weight: BlockFp8Weight, dtype: torch.dtype) -> InputForm:
        """Codes as float16."""
        return InputForm(torch.float16, element=Element.FP8, group_size=weight.block_size[1])

    def codes_form(self, weight: BlockFp8Weight) -> InputForm | None:
        """Quantized by groups as wide as a block."""
        return InputForm(torch.float8_e4m3fn, element=Element.FP8, group_size=weight.block_size[1])

    def matrix(self, weight: BlockFp8Weight) -> QuantizedMatrix:
        """A scale for each block."""
        height, width = weight.block_size
        matrix = weight.matrix.data.view(torch.uint8)
        return QuantizedMatrix(Codes.E4M3, matrix, weight.scale.data, None, width, height, weight.part_sizes)


class GroupedIntOperands:
    """Packed integers of 4 or 8 bits with scales of groups."""

    def why_not(self, weight: GroupedIntWeight) -> str | None:
        """Groups must have a power of two as a factor that fills a tensor core."""
        if largest_power_of_2(weight.group_size, _SMALLEST_GROUP) < _SMALLEST_GROUP:
            return f"groups have {weight.group_size} features, the kernels need multiples of {_SMALLEST_GROUP}"
        return _why_no_versions(weight.part_sizes) if weight.order is not None else None

    def input_form(self, weight: GroupedIntWeight, dtype: torch.dtype) -> InputForm:
        """The model's numbers, in the order of the columns."""
        if weight.order is None:
            return InputForm(dtype, is_split=weight.num_bits == 4)
        order = weight.order.data
        return InputForm(dtype, num_versions=len(order), order=order, is_split=weight.num_bits == 4)

    def codes_form(self, weight: GroupedIntWeight) -> InputForm | None:
        """None: inputs are not quantized."""
        return None

    def matrix(self, weight: GroupedIntWeight) -> QuantizedMatrix:
        """A scale for each row and group."""
        return QuantizedMatrix(
            Codes.UINT4 if weight.num_bits == 4 else Codes.UINT8,
            weight.packed.data.view(torch.uint8),
            weight.scale.data,
            None if weight.zero_point is None else weight.zero_point.data,
            weight.group_size,
            1,
            weight.part_sizes,
        )


class Mxfp4Operands:
    """E2M1 with exponents of groups."""

    def why_not(self, weight: Mxfp4Weight) -> str | None:
        """Every shape fits."""
        return None

    def input_form(self, weight: Mxfp4Weight, dtype: torch.dtype) -> InputForm:
        """The model's numbers."""
        return InputForm(dtype, is_split=True)

    def codes_form(self, weight: Mxfp4Weight) -> InputForm | None:
        """None: inputs are not quantized."""
        return None

    def matrix(self, weight: Mxfp4Weight) -> QuantizedMatrix:
        """An exponent for each row and group."""
        packed = weight.packed.data
        return QuantizedMatrix(Codes.E2M1, packed, weight.exponent.data, None, GROUP_SIZE, 1, (len(packed),))


OPERANDS: dict[type, QuantizedOperands] = {
    ScaledWeight: ScaledOperands(),
    BlockFp8Weight: BlockFp8Operands(),
    GroupedIntWeight: GroupedIntOperands(),
    Mxfp4Weight: Mxfp4Operands(),
}


def codes_form(weight: ScaledWeight, dtype: torch.dtype) -> InputForm:
    """The input of a layer whose activations are quantized, as codes in `dtype`."""
    if weight.activations is Activations.TOKEN:
        return InputForm(dtype, element=weight.element, max_activation=weight.max_activation)
    assert weight.input_scale is not None
    scale = weight.input_scale.data
    return InputForm(dtype, len(scale), weight.element, scale)


def _why_no_versions(part_sizes: tuple[int, ...]) -> str | None:
    """Why the projections cannot have inputs of their own; None if they can."""
    if len(part_sizes) > _MAX_VERSIONS:
        return f"the {len(part_sizes)} projections each have an input of their own, at most {_MAX_VERSIONS} may"
    ends = list(accumulate(part_sizes))[:-1]
    if any(end % BLOCK_OUT for end in ends):
        return (
            f"the projections have {list(part_sizes)} rows, the kernels need multiples of {BLOCK_OUT}, "
            f"because each has an input of its own"
        )
    return None
