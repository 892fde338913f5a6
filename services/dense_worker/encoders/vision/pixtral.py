"""The tower of Mistral Small 3.1: Pixtral's (arXiv:2410.07073), whose squares of patches are merged by a matrix."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from services.common.families.shape import NormKind
from services.common.vision.pixtral import PixtralTower
from services.common.vision.vision_config import PixelScale
from services.dense_worker.encoders.packed_attention import PackedSequences
from services.dense_worker.encoders.vision.layer import VisionLayer, multiply
from services.dense_worker.encoders.vision.operations import Rotation, TowerOperations
from services.dense_worker.encoders.vision.patch_tower import convolution
from services.dense_worker.encoders.vision.picture import Picture, patches_of, scale_pixels
from services.dense_worker.kernels.linear.activation import ACTIVATIONS, MlpActivation
from services.dense_worker.kernels.linear.linear import Cut, Linear, Projection
from services.dense_worker.kernels.norm.norm import Norm
from services.dense_worker.model.allocator import WeightAllocator
from services.dense_worker.parameters import Parameter

_TOWER, _PROJECTOR = "vision_tower", "multi_modal_projector"
_NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class PixtralVisionTower:
    """Pictures of any size, each of which sees itself alone."""

    config: PixtralTower
    patch_embedding: Parameter  # [hidden, 3 * patch_size ** 2]
    norm_before: Norm
    layers: tuple[VisionLayer, ...]
    norm_after: Norm
    merge: Linear  # of a square: all numbers of its first channel, then of the second, ...
    first: Linear
    second: Linear

    def parts(
        self, pictures: Sequence[Picture], pixels: PixelScale, operations: TowerOperations
    ) -> Generator[None, None, list[torch.Tensor]]:
        """Rows [num_outputs, width] of each picture; yields after each layer."""
        config, table = self.config, self.patch_embedding.data
        patches, positions = [], []
        for picture in pictures:
            image = scale_pixels(picture.tiles, pixels, table.device, table.dtype)[0]
            patches.append(patches_of(image, config.patch_size).flatten(2).flatten(0, 1))
            rows, columns = config.grid(picture.shape)
            positions.append(torch.cartesian_prod(torch.arange(rows), torch.arange(columns)))
        x = self.norm_before.normalize(F.linear(torch.cat(patches), table))
        rotation = Rotation.of(self._angles(torch.cat(positions)).to(table.device))
        lengths = [config.num_patches(each.shape) for each in pictures]
        sequences = PackedSequences(lengths, table.device)
        for layer in self.layers:
            x = layer.forward(x, sequences, operations, rotation)
            yield
        grids = zip(self.norm_after.normalize(x).split(lengths), pictures, strict=True)
        merged = multiply(self.merge, torch.cat([self._squares(own, picture) for own, picture in grids]))
        activate = ACTIVATIONS[config.projector_activation]
        found = multiply(self.second, activate(multiply(self.first, merged)))
        return list(found.split([config.num_outputs(each.shape) for each in pictures]))

    def _squares(self, x: torch.Tensor, picture: Picture) -> torch.Tensor:
        """x [num_patches, hidden] -> [num_squares, hidden * merge_size ** 2]"""
        (rows, columns), size = self.config.grid(picture.shape), self.config.merge_size
        squares = x.view(rows // size, size, columns // size, size, -1).permute(0, 2, 4, 1, 3)
        return squares.flatten(0, 1).flatten(1)

    def _angles(self, positions: torch.Tensor) -> torch.Tensor:
        """int64 [n, 2] -> float32 [n, head_dim / 2]: frequencies turn by row and by column in turns."""
        head_dim = self.config.hidden_size // self.config.num_heads
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / self.config.rope_theta**exponents
        rows, columns = positions[:, :1].float(), positions[:, 1:].float()
        return torch.cat((rows * frequencies[0::2], columns * frequencies[1::2]), dim=-1)


def build_mistral3_tower(config: PixtralTower, allocator: WeightAllocator) -> PixtralVisionTower:
    """The tower, uninitialised, with the names of its tensors in checkpoints."""
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.width

    def norm(name: str, stored: str, eps: float = _NORM_EPS) -> Norm:
        return allocator.norm(name, stored, hidden, eps, NormKind.RMS)

    def linear(name: str, in_features: int, *merged_from: Projection, has_bias: bool = False) -> Linear:
        return allocator.linear(name, in_features, merged_from, Cut.OUT, has_bias)

    def layer(index: int) -> VisionLayer:
        block = f"{_TOWER}.transformer.layers.{index}"
        return VisionLayer(
            norm("norm1", f"{block}.attention_norm"),
            linear("qkv", hidden, *(Projection(f"{block}.attention.{each}_proj", hidden) for each in "qkv")),
            linear("o", hidden, Projection(f"{block}.attention.o_proj", hidden)),
            norm("norm2", f"{block}.ffn_norm"),
            linear("mlp_in", hidden, *(Projection(f"{block}.feed_forward.{e}_proj", inner) for e in ("gate", "up"))),
            linear("down", inner, Projection(f"{block}.feed_forward.down_proj", hidden)),
            config.num_heads,
            MlpActivation(config.activation, is_gated=True),
        )

    bias = config.has_projector_bias
    merging = Projection(f"{_PROJECTOR}.patch_merger.merging_layer", hidden)
    return PixtralVisionTower(
        config,
        convolution(f"{_TOWER}.patch_conv.weight", hidden, config.patch_size, allocator),
        norm("before_norm", f"{_TOWER}.ln_pre"),
        tuple(map(layer, range(config.num_layers))),
        norm("after_norm", f"{_PROJECTOR}.norm", config.text_norm_eps),
        linear("merge", hidden * config.merge_size**2, merging),
        linear("first", hidden, Projection(f"{_PROJECTOR}.linear_1", width), has_bias=bias),
        linear("second", width, Projection(f"{_PROJECTOR}.linear_2", width), has_bias=bias),
    )
