"""`GatedProduct`: the first product of a gated MLP with its activation, of 16-bit weights and many rows."""

from __future__ import annotations

import torch

from services.common.families.shape import Activation
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.gated_tiles import GatedTiles
from services.dense_worker.kernels.linear.linear import DTYPES_OF_16_BITS, Linear, PlainWeight
from services.dense_worker.kernels.linear.triton_gated_product import multiply_gated
from services.dense_worker.kernels.triton_launch import KernelLauncher

# With which Triton's kernel is faster than cuBLAS and the kernel of the activation (bench/results/embeddings.md): for
# wider inputs, which have `GatedTiles`, the rate of cuBLAS is worth more than what is not written and read again.
_FEWEST_ROWS, _MOST_IN_FEATURES = 4096, 2048
_MULTIPLE = 8  # of in_features and out_features: rows begin at multiples of 16 bytes


class GatedProduct:
    """Needs Hopper's copies of tiles."""

    def __init__(self, launcher: KernelLauncher, device: torch.device) -> None:
        self._launcher = launcher
        self._has_tile_copies = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
        self._tiles = GatedTiles(launcher, device)
        self.compiled_rows = (_FEWEST_ROWS,) if self._has_tile_copies else ()

    def can_multiply(self, linear: Linear, num_rows: int, activation: MlpActivation) -> bool:
        """Whether the layer and the number of rows are supported, and gain."""
        is_known = isinstance(linear.weight, PlainWeight) and linear.weight.kind in DTYPES_OF_16_BITS
        has_whole_rows = linear.in_features % _MULTIPLE == 0 and linear.out_features % (2 * _MULTIPLE) == 0
        is_plain = is_known and linear.bias is None and has_whole_rows
        if not (self._has_tile_copies and activation.is_gated and is_plain):
            return False
        if linear.in_features <= _MOST_IN_FEATURES:
            return num_rows >= _FEWEST_ROWS
        has_tiles = linear.weight.kind == torch.bfloat16 and activation.function is Activation.SILU
        return has_tiles and self._tiles.can_multiply(num_rows, linear.out_features // 2)

    def multiply(
        self,
        linear: Linear,  # gate rows, then up rows
        x: torch.Tensor,  # [n, in_features], rows contiguous
        out: torch.Tensor,  # [n, out_features / 2], rows of a wider workspace; all begin at multiples of 16 bytes
        activation: MlpActivation,  # gated
    ) -> None:
        """out = activation(gate of x) * (up of x), both rounded to x's dtype before that, as separate kernels would."""
        if linear.in_features > _MOST_IN_FEATURES:
            self._tiles.multiply(x, linear.weight.matrix.data, out)
            return
        multiply_gated(self._launcher, x, linear.weight.matrix.data, out, activation)
