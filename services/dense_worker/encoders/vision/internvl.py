"""The tower of InternVL: InternViT, and two matrices that make a row of the prompt of each square of its rows."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch

from services.common.families.shape import NormKind
from services.common.vision.internvl import InternVLTower
from services.common.vision.vision_config import PixelScale
from services.dense_worker.encoders.vision.layer import (
    PROJECTOR,
    LayerEnd,
    LayerStart,
    PatchEmbedding,
    Projector,
    VisionLayer,
    build_projector,
)
from services.dense_worker.encoders.vision.operations import TowerOperations
from services.dense_worker.encoders.vision.patch_tower import PatchEncoder, convolution
from services.dense_worker.encoders.vision.picture import Picture
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear import Cut, Linear, Projection
from services.dense_worker.kernels.linear.quantized.layer import FLOATS
from services.dense_worker.kernels.norm.norm import Norm
from services.dense_worker.model.allocator import WeightAllocator
from services.dense_worker.parameters import Conversion, Loaded, Parameter, Source, StoredTensor

_TOWER = "vision_tower"
_QK_NORM_EPS, _PROJECTOR_NORM_EPS = 1e-6, 1e-5  # which transformers' classes have as defaults of their norms


@dataclass(frozen=True, slots=True)
class InternVLVisionTower:
    """Each tile is a picture of its own to the layers."""

    config: InternVLTower
    encoder: PatchEncoder
    projector: Projector

    def parts(
        self, pictures: Sequence[Picture], pixels: PixelScale, operations: TowerOperations
    ) -> Generator[None, None, list[torch.Tensor]]:
        """Rows [num_tiles * rows_of_tile, width] of each picture."""
        rows = yield from self.encoder.parts(pictures, pixels, operations)
        size = self.config.square
        squares = rows[:, 1:].unflatten(1, (-1, size, self.config.patches.num_columns // size, size))
        merged = squares.transpose(2, 3).flatten(3).flatten(0, 2)
        outputs = operations.run(self.projector, merged).unflatten(0, (len(rows), -1))
        return [each.flatten(0, 1) for each in outputs.split([each.shape.num_tiles for each in pictures])]


def build_internvl_tower(config: InternVLTower, allocator: WeightAllocator) -> InternVLVisionTower:
    """The tower, uninitialised, with the names of its tensors in checkpoints."""
    merged = config.patches.hidden_size * config.square**2
    norm = allocator.norm("merged_norm", f"{PROJECTOR}.layer_norm", merged, _PROJECTOR_NORM_EPS, NormKind.LAYER)
    projector = build_projector(merged, config.width, config.activation, True, allocator, norm)
    return InternVLVisionTower(config, _build_encoder(config, allocator), projector)


def _build_encoder(config: InternVLTower, allocator: WeightAllocator) -> PatchEncoder:
    patches, embeddings = config.patches, f"{_TOWER}.embeddings"
    hidden, inner = patches.hidden_size, patches.intermediate_size

    def linear(name: str, in_features: int, *merged_from: Projection, has_bias: bool = True) -> Linear:
        return allocator.linear(name, in_features, merged_from, Cut.OUT, has_bias)

    def vector(name: str, stored: str) -> Parameter:
        return allocator.parameter(name, hidden, sources=(Source(stored, hidden),))

    def layer(index: int) -> VisionLayer:
        block = f"{_TOWER}.encoder.layer.{index}"

        def norm(name: str, stored: str, eps: float, kind: NormKind) -> Norm:
            return allocator.norm(name, f"{block}.{stored}", hidden, eps, kind)

        of_qk = [norm(f"{each}_norm", f"attention.{each}_norm", _QK_NORM_EPS, NormKind.RMS) for each in "qk"]
        qkv = (Projection(f"{block}.attention.{each}_proj", hidden) for each in "qkv")
        start = LayerStart(
            norm("norm1", "layernorm_before", patches.norm_eps, config.norm),
            linear("qkv", hidden, *qkv, has_bias=config.has_qkv_bias),
            tuple(of_qk) if config.has_qk_norms else (),
        )
        end = LayerEnd(
            linear("o", hidden, Projection(f"{block}.attention.projection_layer", hidden)),
            norm("norm2", "layernorm_after", patches.norm_eps, config.norm),
            linear("mlp_in", hidden, Projection(f"{block}.mlp.fc1", inner)),
            linear("down", inner, Projection(f"{block}.mlp.fc2", hidden)),
            MlpActivation(patches.activation, is_gated=False),
            (vector("attention_scale", f"{block}.lambda_1"), vector("mlp_scale", f"{block}.lambda_2")),
        )
        return VisionLayer(start, end, patches.num_heads)

    norm_after = None
    if patches.has_final_norm:
        norm_after = allocator.norm("after_norm", f"{_TOWER}.layernorm", hidden, patches.norm_eps, NormKind.LAYER)
    return PatchEncoder(
        patches,
        PatchEmbedding(
            convolution(f"{embeddings}.patch_embeddings.projection.weight", hidden, patches.patch_size, allocator),
            vector("patch_bias", f"{embeddings}.patch_embeddings.projection.bias"),
        ),
        _table("class_token", f"{embeddings}.cls_token", 1, hidden, allocator),
        _table("positions", f"{embeddings}.position_embeddings", patches.num_rows, hidden, allocator),
        None,
        tuple(map(layer, range(patches.num_layers))),
        norm_after,
    )


def _table(name: str, stored: str, num_rows: int, hidden: int, allocator: WeightAllocator) -> Parameter:
    """[num_rows, hidden], which files have with one dimension more."""
    tensor = StoredTensor((stored,), FLOATS, ((1, num_rows, hidden),))

    def unpack(given: Loaded) -> torch.Tensor:
        return given.tensor[0]

    source = Source(stored, num_rows, Conversion((tensor,), unpack))
    return allocator.parameter(name, num_rows, hidden, sources=(source,))
