"""`TiledMatmul`: products of 65 to 1,024 rows in tiles, so that no matrix is dequantized in memory.

`LinearChoice` measures where they are faster than `DequantizedMatmul`. Beyond, cuBLAS has the better tiles, and
dequantizing a matrix takes a small part of the time.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.kernels.linear.linear_choice import TILED_BUCKETS, row_bucket
from services.dense_worker.kernels.linear.quantized.block_fp8_weight import BlockFp8Weight
from services.dense_worker.kernels.linear.quantized.operands import InputForm, PreparedInput, QuantizedMatrix
from services.dense_worker.kernels.linear.quantized.quantized_gemv import OPERANDS, why_not
from services.dense_worker.kernels.linear.quantized.tile_choice import (
    CODE_TILES,
    LARGEST_TILE,
    VALUE_TILES,
    TiledProduct,
    Tiles,
    choose_tiles,
)
from services.dense_worker.kernels.linear.quantized.triton_block_tiles import multiply_block_tiles
from services.dense_worker.kernels.linear.quantized.triton_prepare import prepare_input
from services.dense_worker.kernels.linear.quantized.triton_value_tiles import multiply_value_tiles
from services.dense_worker.kernels.linear.triton_tiles import SPLIT_AREA, SplitWorkspace
from services.dense_worker.kernels.triton_launch import KernelLauncher

_MULTIPLY_ADDS_PER_CYCLE = 2048  # of an SM of Hopper in 16 bits; twice as many in 8


class TiledMatmul:
    """Multiplies weights in groups, in blocks of FP8, in MXFP4, and in 8 bits with inputs that are not quantized.

    Inputs of blocks are quantized by 128 features, and their codes are multiplied.
    """

    def __init__(self, launcher: KernelLauncher, device: torch.device, dtype: torch.dtype) -> None:
        self._launcher, self._dtype = launcher, dtype
        self._splits = SplitWorkspace(device, launcher.num_sms * LARGEST_TILE // SPLIT_AREA)
        self._chosen: dict[tuple[tuple[Tiles, ...], TiledProduct], Tiles] = {}

    def why_not(self, linear: Linear) -> str | None:
        """Why the kernels do not support this layer; None if they do."""
        weight = linear.weight
        if type(weight) not in OPERANDS:
            return "the format has no kernels"
        if (reason := why_not(self._launcher, weight, linear.in_features, self._dtype)) is not None:
            return reason
        if isinstance(weight, BlockFp8Weight):
            height, width = weight.block_size
            size = CODE_TILES[0].block_out, CODE_TILES[0].block_in
            if height % size[0] or width % size[1]:
                return f"blocks have {height} x {width} numbers, tiles need multiples of {size[0]} x {size[1]}"
            return None
        form = OPERANDS[type(weight)].input_form(weight, self._dtype)
        if form.element is not None:
            return "codes of whole rows are multiplied by torch"
        if not self._candidates(form, OPERANDS[type(weight)].matrix(weight)):
            sizes, multiple = list(weight.part_sizes), min(tiles.block_out for tiles in VALUE_TILES)
            return f"the projections, of which each has its own input, have {sizes} rows, not multiples of {multiple}"
        return None

    def can_multiply(self, linear: Linear) -> bool:
        """Whether nothing stands against it."""
        return self.why_not(linear) is None

    def input_form(self, linear: Linear) -> InputForm:
        """Numbers in the model's dtype; of blocks, codes in their own type."""
        form = OPERANDS[type(linear.weight)].input_form(linear.weight, self._dtype)
        return form if form.element is None else replace(form, dtype=torch.float8_e4m3fn)

    def multiply(self, linear: Linear, x: torch.Tensor, out: torch.Tensor, **before: Any) -> None:
        """out = W x + b, in x's dtype, or rounded to it in float32. `before`: what `prepare_input` fuses."""
        form, matrix = self.input_form(linear), OPERANDS[type(linear.weight)].matrix(linear.weight)
        prepared = PreparedInput(x[None], None) if form.is_any else prepare_input(self._launcher, x, form, **before)
        multiply = multiply_value_tiles if form.element is None else multiply_block_tiles
        tiles = self.tiles(linear, len(out))
        multiply(self._launcher, prepared, matrix, linear.bias_data, out, self._dtype, self._splits, tiles)

    def tiles(self, linear: Linear, num_rows: int) -> Tiles:
        """Those for the most rows of the bucket of `num_rows`, so that every step of a bucket runs the same kernels."""
        form, matrix = self.input_form(linear), OPERANDS[type(linear.weight)].matrix(linear.weight)
        product = TiledProduct(
            row_bucket(num_rows) or TILED_BUCKETS[-1],
            linear.out_features,
            linear.in_features,
            matrix.matrix.shape[1] / linear.in_features,
            form.dtype.itemsize,
            _MULTIPLY_ADDS_PER_CYCLE * (1 if form.element is None else 2),
        )
        key = self._candidates(form, matrix), product
        if key not in self._chosen:
            self._chosen[key] = choose_tiles(*key, self._launcher.num_sms)
        return self._chosen[key]

    def _candidates(self, form: InputForm, matrix: QuantizedMatrix) -> tuple[Tiles, ...]:
        """Tiles that are within one projection, if each has an input of its own."""
        tiles = VALUE_TILES if form.element is None else CODE_TILES
        if form.num_versions == 1:
            return tiles
        ends = list(accumulate(matrix.part_sizes))[:-1]
        return tuple(each for each in tiles if not any(end % each.block_out for end in ends))
