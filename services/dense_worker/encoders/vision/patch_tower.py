"""The towers of CLIP (arXiv:2103.00020) and SigLIP (arXiv:2303.15343): patches of a square with learned positions."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch

from services.common.families.shape import NormKind
from services.common.vision.patch_tower import PatchTower
from services.common.vision.vision_config import PixelScale
from services.dense_worker.encoders.packed_attention import PackedSequences
from services.dense_worker.encoders.vision.layer import LayerEnd, LayerStart, PatchEmbedding, VisionLayer
from services.dense_worker.encoders.vision.operations import TowerOperations
from services.dense_worker.encoders.vision.picture import Picture, patches_of
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear import Cut, Linear, Projection
from services.dense_worker.kernels.linear.quantized.layer import FLOATS
from services.dense_worker.kernels.norm.norm import Norm
from services.dense_worker.model.allocator import WeightAllocator
from services.dense_worker.parameters import Conversion, Loaded, Parameter, Source, StoredTensor

_NAME = "vision_tower"


@dataclass(frozen=True, slots=True)
class PatchEncoder:
    """The parts of such a tower."""

    config: PatchTower
    embedding: PatchEmbedding
    class_token: Parameter | None  # [hidden], or with a dimension of 1 before it
    positions: Parameter  # [num_rows, hidden]
    norm_before: Norm | None
    layers: tuple[VisionLayer, ...]
    norm_after: Norm | None

    def parts(
        self, pictures: Sequence[Picture], pixels: PixelScale, operations: TowerOperations
    ) -> Generator[None, None, torch.Tensor]:
        """The rows of all tiles of all pictures, [num_tiles, num_rows, hidden]; yields after each layer."""
        table = self.embedding.matrix.data
        tiles = [operations.read_pixels(each, pixels, table.device, table.dtype) for each in pictures]
        patches = patches_of(torch.cat(tiles), self.config.patch_size).flatten(3).flatten(1, 2)
        x = operations.run(self.embedding, patches.flatten(0, 1)).unflatten(0, patches.shape[:2])
        if self.class_token is not None:
            x = torch.cat((self.class_token.data.expand(len(x), 1, -1), x), dim=1)
        x = x + self.positions.data
        if self.norm_before is not None:
            x = self.norm_before.normalize(x)
        sequences, rows = PackedSequences([x.shape[1]] * len(x), x.device), x.flatten(0, 1)
        for layer in self.layers:
            rows = layer.forward(rows, sequences, operations)
            yield
        if self.norm_after is not None:
            rows = self.norm_after.normalize(rows)
        return rows.view(x.shape)


def build_patch_encoder(config: PatchTower, allocator: WeightAllocator) -> PatchEncoder:
    """The tower, uninitialised, with the names of its tensors in checkpoints."""
    hidden, inner = config.hidden_size, config.intermediate_size

    def norm(name: str, stored: str) -> Norm:
        return allocator.norm(name, f"{_NAME}.{stored}", hidden, config.norm_eps, NormKind.LAYER)

    def linear(name: str, in_features: int, *merged_from: Projection) -> Linear:
        return allocator.linear(name, in_features, merged_from, Cut.OUT, has_bias=True)

    def vector(name: str, stored: str) -> Parameter:
        return allocator.parameter(name, hidden, sources=(Source(f"{_NAME}.embeddings.{stored}", hidden),))

    def layer(index: int) -> VisionLayer:
        block = f"{_NAME}.encoder.layers.{index}"
        start = LayerStart(
            norm("norm1", f"encoder.layers.{index}.layer_norm1"),
            linear("qkv", hidden, *(Projection(f"{block}.self_attn.{each}_proj", hidden) for each in "qkv")),
        )
        end = LayerEnd(
            linear("o", hidden, Projection(f"{block}.self_attn.out_proj", hidden)),
            norm("norm2", f"encoder.layers.{index}.layer_norm2"),
            linear("mlp_in", hidden, Projection(f"{block}.mlp.fc1", inner)),
            linear("down", inner, Projection(f"{block}.mlp.fc2", hidden)),
            MlpActivation(config.activation, is_gated=False),
        )
        return VisionLayer(start, end, config.num_heads)

    positions = Source(f"{_NAME}.embeddings.position_embedding.weight", config.num_rows)
    has_class = config.has_class_token
    return PatchEncoder(
        config,
        PatchEmbedding(
            convolution(f"{_NAME}.embeddings.patch_embedding.weight", hidden, config.patch_size, allocator),
            None if has_class else vector("patch_bias", "patch_embedding.bias"),
        ),
        vector("class_token", "class_embedding") if has_class else None,
        allocator.parameter("positions", config.num_rows, hidden, sources=(positions,)),
        norm("before_norm", "pre_layrnorm") if has_class else None,
        tuple(map(layer, range(config.num_layers))),
        norm("after_norm", "post_layernorm") if config.has_final_norm else None,
    )


def convolution(name: str, hidden: int, patch_size: int, allocator: WeightAllocator) -> Parameter:
    """A convolution over patches that do not overlap, as a matrix, [hidden, 3 * patch_size ** 2]."""
    stored = StoredTensor((name,), FLOATS, ((hidden, 3, patch_size, patch_size),))

    def flatten(given: Loaded) -> torch.Tensor:
        return given.tensor.flatten(1)

    source = Source(name, hidden, Conversion((stored,), flatten))
    return allocator.parameter("patch_embedding", hidden, 3 * patch_size**2, sources=(source,))
