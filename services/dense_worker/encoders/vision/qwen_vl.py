"""The tower of Qwen2.5-VL (arXiv:2502.13923, section 2.1.1): windows in most layers, and angles by row and column.

Patches lie in the order of squares of 2 x 2, each of which becomes a row of the output. Between the embedding and the
last layer these squares are ordered by window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from services.common.families.shape import NormKind
from services.common.vision.qwen_vl import QwenTower
from services.common.vision.vision_config import PixelScale
from services.dense_worker.encoders.packed_attention import PackedSequences
from services.dense_worker.encoders.vision.layer import Rotation, VisionLayer, multiply
from services.dense_worker.encoders.vision.picture import Picture, patches_of, scale_pixels
from services.dense_worker.kernels.linear.linear import Cut, Linear, Projection
from services.dense_worker.kernels.linear.quantized.layer import FLOATS
from services.dense_worker.kernels.norm.norm import Norm
from services.dense_worker.model.allocator import WeightAllocator
from services.dense_worker.parameters import Conversion, Parameter, Source, StoredTensor

_ROPE_THETA = 1e4


@dataclass(frozen=True, slots=True)
class _Grids:
    """Where the patches of several pictures lie."""

    order: torch.Tensor  # int64 [num_tokens]: squares of patches by window
    windows: PackedSequences
    pictures: PackedSequences
    rotation: Rotation


@dataclass(frozen=True, slots=True)
class QwenVisionTower:
    """Computes rows of the prompt from pictures of any size."""

    config: QwenTower
    patch_embedding: Parameter  # [hidden, patch_dim]
    layers: tuple[VisionLayer, ...]
    merge_norm: Norm
    merge_in: Linear
    merge_out: Linear

    def forward(self, pictures: Sequence[Picture], pixels: PixelScale) -> list[torch.Tensor]:
        """Rows [num_tokens, out_hidden] of each picture."""
        table, square = self.patch_embedding.data, self.config.merge_size**2
        x = F.linear(torch.cat([self._patches(each, pixels) for each in pictures]), table)
        grids = self._lay_out(pictures, table.device)
        x = x.unflatten(0, (-1, square))[grids.order].flatten(0, 1)
        for index, layer in enumerate(self.layers):
            sequences = grids.pictures if index in self.config.full_layers else grids.windows
            x = layer.forward(x, sequences, grids.rotation)
        merged = self.merge_norm.normalize(x).view(len(x) // square, -1)
        rows = multiply(self.merge_out, F.gelu(multiply(self.merge_in, merged)))
        in_place = torch.empty_like(rows)
        in_place[grids.order] = rows
        return list(in_place.split([each.shape.num_tokens for each in pictures]))

    def _patches(self, picture: Picture, pixels: PixelScale) -> torch.Tensor:
        """[num_patches, patch_dim], square by square; each patch is a film of equal frames."""
        config, table = self.config, self.patch_embedding.data
        image = scale_pixels(picture.tiles, pixels, table.device, table.dtype)[0]
        patches = patches_of(image, config.patch_size)  # [rows, columns, 3, size, size]
        squares = patches.unflatten(1, (-1, config.merge_size)).unflatten(0, (-1, config.merge_size)).transpose(1, 2)
        films = squares.unsqueeze(-3).expand(*squares.shape[:-2], config.num_frames, *squares.shape[-2:])
        return films.reshape(-1, config.patch_dim)

    def _lay_out(self, pictures: Sequence[Picture], device: torch.device) -> _Grids:
        config = self.config
        merge, side = config.merge_size, config.window_size
        orders, windows, lengths, positions, first = [], [], [], [], 0
        for picture in pictures:
            rows, columns = picture.shape.grid_rows, picture.shape.grid_columns
            row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
            window = (row // side * -(-columns // side) + column // side).flatten()
            orders.append(first + window.argsort(stable=True))
            windows += [count * merge**2 for count in window.bincount().tolist()]
            lengths.append(rows * columns * merge**2)
            inner = torch.cartesian_prod(torch.arange(merge), torch.arange(merge))  # [square, 2]
            positions.append(torch.stack((row.flatten(), column.flatten()), -1)[:, None] * merge + inner)
            first += rows * columns
        order = torch.cat(orders)
        rotation = Rotation.of(axial_angles(torch.cat(positions)[order].flatten(0, 1), self._head_dim).to(device))
        return _Grids(
            order.to(device), PackedSequences(windows, device), PackedSequences(lengths, device), rotation
        )

    @property
    def _head_dim(self) -> int:
        return self.config.hidden_size // self.config.num_heads


def axial_angles(positions: torch.Tensor, head_dim: int, theta: float = _ROPE_THETA) -> torch.Tensor:
    """positions int64 [n, 2], rows and columns -> float32 [n, head_dim / 2]: half of the angles by row, half by column.
    """
    exponents = torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2)
    return (positions[..., None].float() / theta**exponents).flatten(-2)


def build_qwen2_5_tower(config: QwenTower, allocator: WeightAllocator) -> QwenVisionTower:
    """The tower, uninitialised, with the names of its tensors in checkpoints."""
    hidden, square = config.hidden_size, config.merge_size**2

    def linear(name: str, in_features: int, *merged_from: Projection) -> Linear:
        return allocator.linear(name, in_features, merged_from, Cut.OUT, has_bias=True)

    def layer(index: int) -> VisionLayer:
        block, inner = f"visual.blocks.{index}", config.intermediate_size
        return VisionLayer(
            allocator.norm("norm1", f"{block}.norm1", hidden, config.norm_eps, NormKind.RMS),
            linear("qkv", hidden, Projection(f"{block}.attn.qkv", 3 * hidden)),
            linear("o", hidden, Projection(f"{block}.attn.proj", hidden)),
            allocator.norm("norm2", f"{block}.norm2", hidden, config.norm_eps, NormKind.RMS),
            linear("mlp_in", hidden, *(Projection(f"{block}.mlp.{each}_proj", inner) for each in ("gate", "up"))),
            linear("down", inner, Projection(f"{block}.mlp.down_proj", hidden)),
            config.num_heads,
            config.activation,
            is_gated=True,
        )

    merged = square * hidden
    return QwenVisionTower(
        config,
        patch_embedding(config, allocator),
        tuple(map(layer, range(config.num_layers))),
        allocator.norm("merge_norm", "visual.merger.ln_q", hidden, config.norm_eps, NormKind.RMS),
        linear("merge_in", merged, Projection("visual.merger.mlp.0", merged)),
        linear("merge_out", merged, Projection("visual.merger.mlp.2", config.out_hidden_size)),
    )


def patch_embedding(config: QwenTower, allocator: WeightAllocator) -> Parameter:
    """The convolution over patches as a matrix, [hidden, patch_dim]."""
    shape = (config.hidden_size, 3, config.num_frames, config.patch_size, config.patch_size)
    stored = StoredTensor(("visual.patch_embed.proj.weight",), FLOATS, (shape,))
    source = Source(stored.names[0], config.hidden_size, Conversion((stored,), lambda given: given.tensor.flatten(1)))
    return allocator.parameter("patch_embedding", config.hidden_size, config.patch_dim, sources=(source,))
