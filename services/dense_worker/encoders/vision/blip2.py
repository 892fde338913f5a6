"""The tower of BLIP-2 (arXiv:2301.12597): patches, then the Q-Former, whose queries are the same for all pictures."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from services.common.families.shape import NormKind
from services.common.vision.blip2 import Blip2Tower
from services.common.vision.vision_config import PixelScale
from services.dense_worker.encoders.packed_attention import PackedSequences, attend
from services.dense_worker.encoders.vision.layer import LayerEnd, LayerStart, PatchEmbedding, VisionLayer, multiply
from services.dense_worker.encoders.vision.operations import TowerOperations
from services.dense_worker.encoders.vision.patch_tower import PatchEncoder, convolution
from services.dense_worker.encoders.vision.picture import Picture
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear import Cut, Linear, Projection
from services.dense_worker.kernels.linear.quantized.layer import FLOATS
from services.dense_worker.kernels.norm.norm import Norm
from services.dense_worker.model.allocator import WeightAllocator
from services.dense_worker.parameters import Conversion, Parameter, Source, StoredTensor

_TOWER, _QUERIES = "vision_model", "qformer"


@dataclass(frozen=True, slots=True)
class CrossAttention:
    """What queries read of a picture: norm(x + o(attention(x, rows)))."""

    q: Linear
    kv: Linear  # of the tower's rows: k, then v
    o: Linear
    norm: Norm
    num_heads: int

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """x [num_pictures * num_queries, hidden], rows [num_pictures, num_rows, tower's hidden] -> the shape of x"""
        q = multiply(self.q, x).view(len(rows), -1, self.num_heads, x.shape[1] // self.num_heads).transpose(1, 2)
        kv = multiply(self.kv, rows).unflatten(2, (2, self.num_heads, -1))
        k, v = (each.transpose(1, 2) for each in kv.unbind(2))
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).flatten(0, 1)
        return self.norm.normalize(x + multiply(self.o, seen))


@dataclass(frozen=True, slots=True)
class QueryLayer:
    """A layer of the Q-Former, with norms of sums: queries see each other, then in some layers the picture."""

    qkv: Linear
    o: Linear
    norm: Norm
    cross: CrossAttention | None
    up: Linear
    down: Linear
    mlp_norm: Norm
    num_heads: int
    activation: MlpActivation

    def forward(
        self, x: torch.Tensor, sequences: PackedSequences, rows: torch.Tensor, operations: TowerOperations
    ) -> torch.Tensor:
        """x [num_pictures * num_queries, hidden], rows [num_pictures, num_rows, tower's hidden] -> the shape of x"""
        q, k, v = multiply(self.qkv, x).view(len(x), 3, self.num_heads, -1).unbind(1)
        x = self.norm.normalize(x + multiply(self.o, attend(q, k, v, sequences).flatten(1)))
        if self.cross is not None:
            x = self.cross.forward(x, rows)
        delta = operations.multiply(self.down, multiply(self.up, x), activation=self.activation)
        return self.mlp_norm.normalize(x + delta)


@dataclass(frozen=True, slots=True)
class Blip2VisionTower:
    """Each picture is one tile."""

    config: Blip2Tower
    encoder: PatchEncoder
    queries: Parameter  # [num_queries, hidden]
    norm: Norm
    layers: tuple[QueryLayer, ...]
    projection: Linear

    def parts(
        self, pictures: Sequence[Picture], pixels: PixelScale, operations: TowerOperations
    ) -> Generator[None, None, list[torch.Tensor]]:
        """Rows [num_queries, width] of each picture; yields after each layer."""
        rows = yield from self.encoder.parts(pictures, pixels, operations)
        count = self.config.queries.num_queries
        sequences = PackedSequences([count] * len(pictures), rows.device)
        x = self.norm.normalize(self.queries.data).repeat(len(pictures), 1)
        for layer in self.layers:
            x = layer.forward(x, sequences, rows, operations)
            yield
        return list(multiply(self.projection, x).split(count))


def build_blip2_tower(config: Blip2Tower, allocator: WeightAllocator) -> Blip2VisionTower:
    """The tower, uninitialised, with the names of its tensors in checkpoints."""
    sizes = config.queries
    hidden, eps = sizes.hidden_size, sizes.norm_eps

    def linear(name: str, in_features: int, out_features: int, *stored: str) -> Linear:
        merged_from = tuple(Projection(each, out_features) for each in stored)
        return allocator.linear(name, in_features, merged_from, Cut.OUT, has_bias=True)

    def norm(name: str, stored: str) -> Norm:
        return allocator.norm(name, stored, hidden, eps, NormKind.LAYER)

    def cross(block: str) -> CrossAttention:
        attention, after, of_tower = f"{block}.attention", f"{block}.output", config.patches.hidden_size
        return CrossAttention(
            linear("cross_q", hidden, hidden, f"{attention}.query"),
            linear("cross_kv", of_tower, hidden, f"{attention}.key", f"{attention}.value"),
            linear("cross_o", hidden, hidden, f"{after}.dense"),
            norm("cross_norm", f"{after}.LayerNorm"),
            sizes.num_heads,
        )

    def layer(index: int) -> QueryLayer:
        block, inner = f"{_QUERIES}.encoder.layer.{index}", sizes.intermediate_size
        attention, after = f"{block}.attention.attention", f"{block}.attention.output"
        return QueryLayer(
            linear("qkv", hidden, hidden, *(f"{attention}.{each}" for each in ("query", "key", "value"))),
            linear("o", hidden, hidden, f"{after}.dense"),
            norm("norm1", f"{after}.LayerNorm"),
            cross(f"{block}.crossattention") if index % sizes.cross_interval == 0 else None,
            linear("up", hidden, inner, f"{block}.intermediate_query.dense"),
            linear("down", inner, hidden, f"{block}.output_query.dense"),
            norm("norm2", f"{block}.output_query.LayerNorm"),
            sizes.num_heads,
            MlpActivation(sizes.activation, is_gated=False),
        )

    return Blip2VisionTower(
        config,
        _build_encoder(config, allocator),
        _vectors("queries", "query_tokens", sizes.num_queries, hidden, allocator),
        norm("queries_norm", f"{_QUERIES}.layernorm"),
        tuple(map(layer, range(sizes.num_layers))),
        linear("projection", hidden, config.width, "language_projection"),
    )


def _build_encoder(config: Blip2Tower, allocator: WeightAllocator) -> PatchEncoder:
    patches = config.patches
    hidden, inner, rows = patches.hidden_size, patches.intermediate_size, f"{_TOWER}.embeddings"

    def norm(name: str, stored: str) -> Norm:
        return allocator.norm(name, f"{_TOWER}.{stored}", hidden, patches.norm_eps, NormKind.LAYER)

    def linear(name: str, in_features: int, out_features: int, stored: str, has_bias: bool = True) -> Linear:
        return allocator.linear(name, in_features, (Projection(stored, out_features),), Cut.OUT, has_bias)

    def layer(index: int) -> VisionLayer:
        block = f"{_TOWER}.encoder.layers.{index}"
        start = LayerStart(
            norm("norm1", f"encoder.layers.{index}.layer_norm1"),
            linear("qkv", hidden, 3 * hidden, f"{block}.self_attn.qkv", config.has_qkv_bias),
        )
        end = LayerEnd(
            linear("o", hidden, hidden, f"{block}.self_attn.projection"),
            norm("norm2", f"encoder.layers.{index}.layer_norm2"),
            linear("mlp_in", hidden, inner, f"{block}.mlp.fc1"),
            linear("down", inner, hidden, f"{block}.mlp.fc2"),
            MlpActivation(patches.activation, is_gated=False),
        )
        return VisionLayer(start, end, patches.num_heads)

    bias = (Source(f"{rows}.patch_embedding.bias", hidden),)
    return PatchEncoder(
        patches,
        PatchEmbedding(
            convolution(f"{rows}.patch_embedding.weight", hidden, patches.patch_size, allocator),
            allocator.parameter("patch_bias", hidden, sources=bias),
        ),
        _vectors("class_token", f"{rows}.class_embedding", 1, hidden, allocator),
        _vectors("positions", f"{rows}.position_embedding", patches.num_rows, hidden, allocator),
        None,
        tuple(map(layer, range(patches.num_layers))),
        norm("after_norm", "post_layernorm"),
    )


def _vectors(name: str, stored: str, count: int, size: int, allocator: WeightAllocator) -> Parameter:
    """A table, [count, size], which files have as [1, count, size]."""
    conversion = Conversion((StoredTensor((stored,), FLOATS, ((1, count, size),)),), lambda given: given.tensor[0])
    return allocator.parameter(name, count, size, sources=(Source(stored, count, conversion),))
