"""The towers of Qwen2.5-VL (arXiv:2502.13923, section 2.1.1) and Qwen3-VL: angles by row and column.

Patches lie in the order of squares of 2 x 2, each of which becomes a row of the output. Qwen2.5-VL has windows in most
layers: between the embedding and the last layer its squares are ordered by window. Qwen3-VL has a table of positions,
and rows of some layers besides the last, which are added after the first layers of text.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from torch.nn import functional as F

from services.common.families.shape import NormKind
from services.common.vision.qwen_vl import QwenTower
from services.common.vision.vision_config import PixelScale
from services.dense_worker.encoders.packed_attention import PackedSequences
from services.dense_worker.encoders.vision.layer import LayerEnd, LayerStart, PatchEmbedding, VisionLayer, multiply
from services.dense_worker.encoders.vision.operations import Rotation, RowPart, TowerOperations
from services.dense_worker.encoders.vision.picture import Picture, patches_of
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear import Cut, Linear, Projection
from services.dense_worker.kernels.linear.quantized.layer import FLOATS
from services.dense_worker.kernels.norm.norm import Norm
from services.dense_worker.model.allocator import WeightAllocator
from services.dense_worker.model.stored_layout import Padded
from services.dense_worker.parameters import Conversion, Parameter, Source, StoredTensor
from services.dense_worker.sampling.upload import upload

_ROPE_THETA = 1e4
_ALL = 2**30  # as the side of a window
# Of the size of an MLP. For rows of 3420 cuBLAS takes an older kernel, which takes 3.7 times as long on an H100.
# Products of FP8 need a multiple of 16.
_MLP_MULTIPLE = 16
Kind = TypeVar("Kind", bound="Merger")


@dataclass(frozen=True, slots=True)
class Grids:
    """Where the patches of several pictures lie, as the layers see it: ordered by window."""

    order: torch.Tensor  # int32 [num_tokens], as in `TowerLayout`
    windows: PackedSequences
    pictures: PackedSequences
    rotation: Rotation


class TowerLayout(NamedTuple):
    """The same in the host's memory."""

    order: np.ndarray  # int32 [num_tokens]: squares of patches by window
    windows: list[int]  # patches of each window
    pictures: list[int]  # patches of each picture
    positions: np.ndarray  # int32 [num_patches, 2]: row and column of each patch, ordered by window


@dataclass(frozen=True, slots=True)
class Merger(RowPart):
    """Makes a row of the output of each square of patches."""

    norm: Norm  # of a patch, or of a square
    first: Linear
    second: Linear
    square: int  # patches in a square
    segment: ClassVar[str] = "merge"

    @property
    def row_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"x": (self.square, self.first.in_features // self.square)}

    def forward(self, operations: TowerOperations, x: torch.Tensor) -> torch.Tensor:
        """x [num_squares, square, hidden] -> [num_squares, out_hidden]"""
        return self._multiply(self.norm.normalize(x).view(-1, self.first.in_features))

    def _multiply(self, merged: torch.Tensor) -> torch.Tensor:
        return multiply(self.second, F.gelu(multiply(self.first, merged)))


@dataclass(frozen=True, slots=True)
class DeepMerger(Merger):
    """That of a layer before the last: a square is normalised as one row."""

    segment: ClassVar[str] = "merge_deep"

    def forward(self, operations: TowerOperations, x: torch.Tensor) -> torch.Tensor:
        """x [num_squares, square, hidden] -> [num_squares, out_hidden]"""
        return self._multiply(self.norm.normalize(x.view(-1, self.first.in_features)))


@dataclass(frozen=True, slots=True)
class QwenVisionTower:
    """Computes rows of the prompt from pictures of any size."""

    config: QwenTower
    embedding: PatchEmbedding
    positions: Parameter | None  # [num_position_columns ** 2, hidden]
    layers: tuple[VisionLayer, ...]
    merger: Merger
    deep_mergers: tuple[DeepMerger, ...]  # for each of the deep layers

    def parts(
        self, pictures: Sequence[Picture], pixels: PixelScale, operations: TowerOperations
    ) -> Generator[None, None, list[torch.Tensor]]:
        """Rows [num_tokens, width] of each picture: those of the last layer, then those of each deep layer.

        Yields after each layer.
        """
        layout, device = self.lay_out(pictures), self.embedding.matrix.data.device
        positions, steps = (upload(each, device) for each in (layout.positions, self.angle_steps()))
        grids = Grids(
            upload(layout.order, device),
            PackedSequences(layout.windows, device),
            PackedSequences(layout.pictures, device),
            Rotation.of(axial_angles(positions, steps)),
        )
        rows = yield from self.compute(self.embed(pictures, pixels, operations), grids, operations)
        return self.by_picture(rows, pictures)

    def embed(
        self, pictures: Sequence[Picture], pixels: PixelScale, operations: TowerOperations
    ) -> torch.Tensor:
        """What the layers read, [num_patches, hidden], square by square."""
        x = operations.run(self.embedding, torch.cat([self._patches(each, pixels, operations) for each in pictures]))
        if self.positions is not None:
            x = x + torch.cat([self._positions_of(each) for each in pictures])
        return x

    def compute(
        self, x: torch.Tensor, grids: Grids, operations: TowerOperations
    ) -> Generator[None, None, torch.Tensor]:
        """All layers: x [num_patches, hidden] -> [num_tokens, width], both square by square.

        Yields after each layer.
        """
        config, square, deep = self.config, self.config.merge_size**2, list[torch.Tensor]()
        x = x.unflatten(0, (-1, square)).index_select(0, grids.order).flatten(0, 1)
        for index, layer in enumerate(self.layers):
            sees_all = not config.window_size or index in config.full_layers
            x = layer.forward(x, grids.pictures if sees_all else grids.windows, operations, grids.rotation)
            if index in config.deep_layers:
                deep.append(operations.run(self.deep_mergers[len(deep)], x.unflatten(0, (-1, square))))
            yield
        rows = torch.cat((operations.run(self.merger, x.unflatten(0, (-1, square))), *deep), dim=-1)
        return torch.empty_like(rows).index_copy_(0, grids.order.long(), rows)

    def by_picture(self, rows: torch.Tensor, pictures: Sequence[Picture]) -> list[torch.Tensor]:
        """The rows of each picture, in the order of its tokens."""
        return list(rows.split([each.shape.num_tokens for each in pictures]))

    def _positions_of(self, picture: Picture) -> torch.Tensor:
        """[num_patches, hidden], square by square: the table, stretched over the picture by bilinear interpolation."""
        assert self.positions is not None, "there is a table"
        config, table = self.config, self.positions.data
        count, merge = config.num_position_columns, config.merge_size
        sides = [side * merge for side in (picture.shape.grid_rows, picture.shape.grid_columns)]
        near, weights = zip(*(_interpolate(side, count, table.device) for side in sides), strict=True)
        found = 0
        for row, column in itertools.product(range(2), range(2)):
            rows = table[near[0][row][:, None] * count + near[1][column]]
            weight = weights[0][row][:, None] * weights[1][column]
            found = found + rows * weight[..., None]
        squares = found.to(table.dtype).unflatten(1, (-1, merge)).unflatten(0, (-1, merge)).transpose(1, 2)
        return squares.flatten(0, 3)

    def _patches(self, picture: Picture, pixels: PixelScale, operations: TowerOperations) -> torch.Tensor:
        """[num_patches, patch_dim], square by square; each patch is a film of equal frames."""
        config, table = self.config, self.embedding.matrix.data
        image = operations.read_pixels(picture, pixels, table.device, table.dtype)[0]
        patches = patches_of(image, config.patch_size)  # [rows, columns, 3, size, size]
        squares = patches.unflatten(1, (-1, config.merge_size)).unflatten(0, (-1, config.merge_size)).transpose(1, 2)
        films = squares.unsqueeze(-3).expand(*squares.shape[:-2], config.num_frames, *squares.shape[-2:])
        return films.reshape(-1, config.patch_dim)

    def lay_out(self, pictures: Sequence[Picture]) -> TowerLayout:
        """Of several pictures together."""
        config, first = self.config, 0
        orders, windows, lengths, positions = [], [], [], []
        for picture in pictures:
            rows, columns = picture.shape.grid_rows, picture.shape.grid_columns
            one = _layout_of(rows, columns, config.merge_size, config.window_size or _ALL)
            orders.append(one.order + first)
            windows += one.windows
            lengths += one.pictures
            positions.append(one.positions)
            first += rows * columns
        return TowerLayout(np.concatenate(orders), windows, lengths, np.concatenate(positions))

    def angle_steps(self) -> np.ndarray:
        """What `axial_angles` divides by: float32 [head_dim / 4]."""
        exponents = torch.arange(0, self.head_dim // 2, 2, dtype=torch.float32) / (self.head_dim // 2)
        return (_ROPE_THETA**exponents).numpy()

    @property
    def head_dim(self) -> int:
        """Of the attention of its layers."""
        return self.config.hidden_size // self.config.num_heads


@lru_cache(maxsize=16)
def _layout_of(rows: int, columns: int, merge: int, side: int) -> TowerLayout:
    """Of one picture with so many squares of `merge` x `merge` patches, in windows of `side` x `side` squares."""
    row, column = np.divmod(np.arange(rows * columns), columns)
    window = row // side * -(-columns // side) + column // side
    order = window.argsort(kind="stable").astype(np.int32)
    inner = np.stack(np.divmod(np.arange(merge**2), merge), axis=-1)  # [square, 2]
    positions = np.stack((row, column), axis=-1)[order, None] * merge + inner
    windows = [count * merge**2 for count in np.bincount(window).tolist()]
    return TowerLayout(order, windows, [rows * columns * merge**2], positions.reshape(-1, 2).astype(np.int32))


def axial_angles(positions: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """positions int32 [n, 2], steps float32 [s] -> float32 [n, 2 s]: half of the angles by row, half by column."""
    return (positions[..., None].float() / steps).flatten(-2)


def _interpolate(size: int, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Of `size` places, spread evenly over `count` rows of a table: the two rows at each, and their weights.

    int64 [2, size], float32 [2, size]
    """
    places = torch.linspace(0, count - 1, size, device=device)
    first = places.floor().long()
    part = places - first
    return torch.stack((first, (first + 1).clamp(max=count - 1))), torch.stack((1 - part, part))


def build_qwen2_5_tower(config: QwenTower, allocator: WeightAllocator) -> QwenVisionTower:
    """The tower, uninitialised, with the names of its tensors in checkpoints."""
    hidden, square = config.hidden_size, config.merge_size**2
    padding = -config.intermediate_size % _MLP_MULTIPLE
    inner = config.intermediate_size + padding  # the further values are 0: activation(0) * 0

    def linear(name: str, in_features: int, *merged_from: Projection) -> Linear:
        return allocator.linear(name, in_features, merged_from, Cut.OUT, has_bias=True)

    def layer(index: int) -> VisionLayer:
        block = f"visual.blocks.{index}"
        gate_up = [Projection(f"{block}.mlp.{each}_proj", inner, Padded(padding)) for each in ("gate", "up")]
        start = LayerStart(
            allocator.norm("norm1", f"{block}.norm1", hidden, config.norm_eps, NormKind.RMS),
            linear("qkv", hidden, Projection(f"{block}.attn.qkv", 3 * hidden)),
        )
        end = LayerEnd(
            linear("o", hidden, Projection(f"{block}.attn.proj", hidden)),
            allocator.norm("norm2", f"{block}.norm2", hidden, config.norm_eps, NormKind.RMS),
            linear("mlp_in", hidden, *gate_up),
            linear("down", inner, Projection(f"{block}.mlp.down_proj", hidden, Padded(num_columns=padding))),
            MlpActivation(config.activation, is_gated=True),
        )
        return VisionLayer(start, end, config.num_heads)

    merged = square * hidden
    merger = Merger(
        allocator.norm("merge_norm", "visual.merger.ln_q", hidden, config.norm_eps, NormKind.RMS),
        linear("merge_in", merged, Projection("visual.merger.mlp.0", merged)),
        linear("merge_out", merged, Projection("visual.merger.mlp.2", config.out_hidden_size)),
        square,
    )
    layers = tuple(map(layer, range(config.num_layers)))
    return QwenVisionTower(config, PatchEmbedding(convolution(config, allocator), None), None, layers, merger, ())


def build_qwen3_tower(config: QwenTower, allocator: WeightAllocator) -> QwenVisionTower:
    """The tower, uninitialised, with the names of its tensors in checkpoints."""
    hidden, merged = config.hidden_size, config.merge_size**2 * config.hidden_size

    def norm(name: str, stored: str, size: int = hidden) -> Norm:
        return allocator.norm(name, f"visual.{stored}", size, config.norm_eps, NormKind.LAYER)

    def linear(name: str, in_features: int, stored: str, out_features: int) -> Linear:
        projection = Projection(f"visual.{stored}", out_features)
        return allocator.linear(name, in_features, (projection,), Cut.OUT, has_bias=True)

    def layer(index: int) -> VisionLayer:
        block, inner = f"blocks.{index}", config.intermediate_size
        start = LayerStart(norm("norm1", f"{block}.norm1"), linear("qkv", hidden, f"{block}.attn.qkv", 3 * hidden))
        end = LayerEnd(
            linear("o", hidden, f"{block}.attn.proj", hidden),
            norm("norm2", f"{block}.norm2"),
            linear("mlp_in", hidden, f"{block}.mlp.linear_fc1", inner),
            linear("down", inner, f"{block}.mlp.linear_fc2", hidden),
            MlpActivation(config.activation, is_gated=False),
        )
        return VisionLayer(start, end, config.num_heads)

    def merger(kind: type[Kind], stored: str, norm_size: int) -> Kind:
        return kind(
            norm("merge_norm", f"{stored}.norm", norm_size),
            linear("merge_in", merged, f"{stored}.linear_fc1", merged),
            linear("merge_out", merged, f"{stored}.linear_fc2", config.out_hidden_size),
            config.merge_size**2,
        )

    num_positions = config.num_position_columns**2
    positions = (Source("visual.pos_embed.weight", num_positions),)
    bias = allocator.parameter("patch_bias", hidden, sources=(Source("visual.patch_embed.proj.bias", hidden),))
    deep = (f"deepstack_merger_list.{index}" for index in range(len(config.deep_layers)))
    return QwenVisionTower(
        config,
        PatchEmbedding(convolution(config, allocator), bias),
        allocator.parameter("positions", num_positions, hidden, sources=positions),
        tuple(map(layer, range(config.num_layers))),
        merger(Merger, "merger", hidden),
        tuple(merger(DeepMerger, each, merged) for each in deep),
    )


def convolution(config: QwenTower, allocator: WeightAllocator) -> Parameter:
    """The convolution over patches as a matrix, [hidden, patch_dim]."""
    shape = (config.hidden_size, 3, config.num_frames, config.patch_size, config.patch_size)
    stored = StoredTensor(("visual.patch_embed.proj.weight",), FLOATS, (shape,))
    source = Source(stored.names[0], config.hidden_size, Conversion((stored,), lambda given: given.tensor.flatten(1)))
    return allocator.parameter("patch_embedding", config.hidden_size, config.patch_dim, sources=(source,))
