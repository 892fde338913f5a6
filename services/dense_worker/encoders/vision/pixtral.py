"""The tower of Pixtral (arXiv:2410.07073). In Mistral Small 3.1, squares of its rows are merged by a matrix."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from services.common.families.shape import NormKind
from services.common.vision.pixtral import PixtralTower
from services.common.vision.vision_config import PixelScale
from services.dense_worker.encoders.packed_attention import PackedSequences
from services.dense_worker.encoders.vision.layer import (
    PROJECTOR,
    LayerEnd,
    LayerStart,
    PatchEmbedding,
    Projector,
    VisionLayer,
    build_projector,
    multiply,
)
from services.dense_worker.encoders.vision.operations import Rotation, RowPart, TowerOperations
from services.dense_worker.encoders.vision.patch_tower import convolution
from services.dense_worker.encoders.vision.picture import Picture, patches_of
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear import Cut, Linear, Projection
from services.dense_worker.kernels.norm.norm import Norm
from services.dense_worker.model.allocator import WeightAllocator
from services.dense_worker.sampling.upload import upload

_TOWER = "vision_tower"
_NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class PixtralEncoder:
    """Pictures of any size, each of which sees itself alone."""

    config: PixtralTower
    embedding: PatchEmbedding
    norm_before: Norm
    layers: tuple[VisionLayer, ...]

    def parts(
        self, pictures: Sequence[Picture], pixels: PixelScale, operations: TowerOperations
    ) -> Generator[None, None, torch.Tensor]:
        """The rows of all patches of all pictures, [num_patches, hidden]; yields after each layer."""
        config, table = self.config, self.embedding.matrix.data
        patches, positions = [], []
        for picture in pictures:
            image = operations.read_pixels(picture, pixels, table.device, table.dtype)[0]
            patches.append(patches_of(image, config.patch_size).flatten(2).flatten(0, 1))
            rows, columns = config.grid(picture.shape)
            positions.append(torch.cartesian_prod(torch.arange(rows), torch.arange(columns)))
        x = self.norm_before.normalize(operations.run(self.embedding, torch.cat(patches)))
        rotation = Rotation.of(upload(self._angles(torch.cat(positions)).numpy(), table.device))
        sequences = PackedSequences([config.num_patches(each.shape) for each in pictures], table.device)
        for layer in self.layers:
            x = layer.forward(x, sequences, operations, rotation)
            yield
        return x

    def _angles(self, positions: torch.Tensor) -> torch.Tensor:
        """int64 [n, 2] -> float32 [n, head_dim / 2]: frequencies turn by row and by column in turns."""
        head_dim = self.config.hidden_size // self.config.num_heads
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / self.config.rope_theta**exponents
        rows, columns = positions[:, :1].float(), positions[:, 1:].float()
        return torch.cat((rows * frequencies[0::2], columns * frequencies[1::2]), dim=-1)


@dataclass(frozen=True, slots=True)
class PixtralVisionTower:
    """Pixtral in LLaVA's form: each patch becomes a row of the prompt, by two matrices."""

    config: PixtralTower
    encoder: PixtralEncoder
    projector: Projector

    def parts(
        self, pictures: Sequence[Picture], pixels: PixelScale, operations: TowerOperations
    ) -> Generator[None, None, list[torch.Tensor]]:
        """Rows [num_outputs, width] of each picture."""
        rows = yield from self.encoder.parts(pictures, pixels, operations)
        return self.project(rows, pictures, operations)

    def project(
        self, rows: torch.Tensor, pictures: Sequence[Picture], operations: TowerOperations
    ) -> list[torch.Tensor]:
        """rows [n, hidden] of all pictures -> [num_outputs, width] of each"""
        projected = operations.run(self.projector, rows)
        return list(projected.split([self.config.num_outputs(each.shape) for each in pictures]))


@dataclass(frozen=True, slots=True)
class SquareMerge(RowPart):
    """A matrix that makes one row of a square's."""

    matrix: Linear  # of a square: all numbers of its first channel, then of the second, ...
    segment: ClassVar[str] = "merge"

    @property
    def row_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"x": (self.matrix.in_features,)}

    def forward(self, operations: TowerOperations, x: torch.Tensor) -> torch.Tensor:
        """x [n, hidden * merge_size ** 2] -> [n, hidden]"""
        return multiply(self.matrix, x)


@dataclass(frozen=True, slots=True)
class Mistral3VisionTower:
    """Mistral Small 3.1: before that, squares of patches are normalised and merged."""

    config: PixtralTower
    tower: PixtralVisionTower
    norm: Norm
    merge: SquareMerge

    def parts(
        self, pictures: Sequence[Picture], pixels: PixelScale, operations: TowerOperations
    ) -> Generator[None, None, list[torch.Tensor]]:
        """Rows [num_outputs, width] of each picture."""
        rows = yield from self.tower.encoder.parts(pictures, pixels, operations)
        lengths = [self.config.num_patches(each.shape) for each in pictures]
        grids = zip(self.norm.normalize(rows).split(lengths), pictures, strict=True)
        merged = operations.run(self.merge, torch.cat([self._squares(own, picture) for own, picture in grids]))
        return self.tower.project(merged, pictures, operations)

    def _squares(self, x: torch.Tensor, picture: Picture) -> torch.Tensor:
        """x [num_patches, hidden] -> [num_squares, hidden * merge_size ** 2]"""
        (rows, columns), size = self.config.grid(picture.shape), self.config.merge_size
        squares = x.view(rows // size, size, columns // size, size, -1).permute(0, 2, 4, 1, 3)
        return squares.flatten(0, 1).flatten(1)


def build_mistral3_tower(config: PixtralTower, allocator: WeightAllocator) -> Mistral3VisionTower:
    """The tower, uninitialised, with the names of its tensors in checkpoints."""
    hidden = config.hidden_size
    merging = (Projection(f"{PROJECTOR}.patch_merger.merging_layer", hidden),)
    return Mistral3VisionTower(
        config,
        build_pixtral_tower(config, allocator),
        allocator.norm("after_norm", f"{PROJECTOR}.norm", hidden, config.text_norm_eps, NormKind.RMS),
        SquareMerge(allocator.linear("merge", hidden * config.merge_size**2, merging, Cut.OUT, has_bias=False)),
    )


def build_pixtral_tower(config: PixtralTower, allocator: WeightAllocator) -> PixtralVisionTower:
    """The tower, uninitialised, with the names of its tensors in checkpoints."""
    activation, has_bias = config.projector_activation, config.has_projector_bias
    return PixtralVisionTower(
        config,
        _build_encoder(config, allocator),
        build_projector(config.hidden_size, config.width, activation, has_bias, allocator),
    )


def _build_encoder(config: PixtralTower, allocator: WeightAllocator) -> PixtralEncoder:
    hidden, inner = config.hidden_size, config.intermediate_size

    def norm(name: str, stored: str) -> Norm:
        return allocator.norm(name, stored, hidden, _NORM_EPS, NormKind.RMS)

    def linear(name: str, in_features: int, *merged_from: Projection) -> Linear:
        return allocator.linear(name, in_features, merged_from, Cut.OUT, has_bias=False)

    def layer(index: int) -> VisionLayer:
        block = f"{_TOWER}.transformer.layers.{index}"
        start = LayerStart(
            norm("norm1", f"{block}.attention_norm"),
            linear("qkv", hidden, *(Projection(f"{block}.attention.{each}_proj", hidden) for each in "qkv")),
        )
        end = LayerEnd(
            linear("o", hidden, Projection(f"{block}.attention.o_proj", hidden)),
            norm("norm2", f"{block}.ffn_norm"),
            linear("mlp_in", hidden, *(Projection(f"{block}.feed_forward.{e}_proj", inner) for e in ("gate", "up"))),
            linear("down", inner, Projection(f"{block}.feed_forward.down_proj", hidden)),
            MlpActivation(config.activation, is_gated=True),
        )
        return VisionLayer(start, end, config.num_heads)

    return PixtralEncoder(
        config,
        PatchEmbedding(convolution(f"{_TOWER}.patch_conv.weight", hidden, config.patch_size, allocator), None),
        norm("before_norm", f"{_TOWER}.ln_pre"),
        tuple(map(layer, range(config.num_layers))),
    )
