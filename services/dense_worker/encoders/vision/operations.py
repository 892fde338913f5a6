"""`TowerOperations`: what the layers of towers do. In torch here, by kernels on a GPU.

A `RowPart` has weights and computes each row by itself: what ONNX and TensorRT get of a tower. Between such parts lies
what has no weights, or adds tables: attention, rotation, positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from services.common.vision.vision_config import PixelScale
from services.dense_worker.encoders import packed_attention
from services.dense_worker.encoders.packed_attention import PackedSequences
from services.dense_worker.encoders.vision.picture import Picture, scale_pixels
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.kernels.norm.norm import Norm
from services.dense_worker.parameters import parts_of_type

PREFIX = "tower_"  # of the names of its segments, where the others of the model have theirs
OUTPUT = "rows_out"  # of every segment


@dataclass(frozen=True, slots=True)
class Rotation:
    """Turns pairs of dimensions, which are half a head apart, by angles of their own for each token."""

    cos: torch.Tensor  # float32 [num_tokens, head_dim / 2]
    sin: torch.Tensor

    @classmethod
    def of(cls, angles: torch.Tensor) -> Rotation:
        """angles: float32 [num_tokens, head_dim / 2]"""
        return cls(angles.cos(), angles.sin())

    def apply(self, heads: torch.Tensor) -> torch.Tensor:
        """heads [num_tokens, num_heads, head_dim] -> the same, computed in float32."""
        cos, sin = self.cos[:, None], self.sin[:, None]
        first, second = heads.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)


class RowPart:
    """A frozen dataclass of parameters. Parts of a tower that have one `segment` have equal shapes."""

    __slots__ = ()
    segment: ClassVar[str]

    @property
    def row_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of a row of each input, by its name."""
        raise NotImplementedError

    def forward(self, operations: TowerOperations, *inputs: torch.Tensor) -> torch.Tensor:
        """inputs: [n, *row shape], which may be overwritten -> [n, width]"""
        raise NotImplementedError


def segments_of_tower(tower: object) -> dict[str, list[RowPart]]:
    """The parts of each segment, by name with `PREFIX`, in their order."""
    found: dict[str, list[RowPart]] = {}
    for part in parts_of_type(RowPart, tower):
        found.setdefault(PREFIX + part.segment, []).append(part)
    return found


class TowerOperations(Protocol):
    """Used on the engine thread."""

    def read_pixels(
        self, picture: Picture, scale: PixelScale, device: torch.device, dtype: torch.dtype
    ) -> torch.Tensor:
        """[num_tiles, 3, height, width] in `dtype`, of pixels that may have to be resized; see `scale_pixels`."""

    def run(self, part: RowPart, *inputs: torch.Tensor) -> torch.Tensor:
        """What `part` makes of its inputs, which may be overwritten."""

    def multiply(
        self,
        linear: Linear,
        x: torch.Tensor,
        *,
        norm: Norm | None = None,
        activation: MlpActivation | None = None,
    ) -> torch.Tensor:
        """The product with x [n, in_features], normalised or activated before, for which it may be twice as wide.

        [n, out_features], in x's dtype.
        """

    def add_multiply(
        self, linear: Linear, x: torch.Tensor, delta: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of x and delta, [n, in_features], and the product with its norm. Both may be overwritten."""

    def attend(self, heads: torch.Tensor, sequences: PackedSequences, rotation: Rotation | None) -> torch.Tensor:
        """heads [n, 3, num_heads, head_dim], q, k and v, which may be overwritten -> [n, num_heads * head_dim].

        rotation: of q and k; None: they are not turned
        """


class TorchTowerOperations:
    """The reference for kernels, and what torch.export records."""

    def read_pixels(
        self, picture: Picture, scale: PixelScale, device: torch.device, dtype: torch.dtype
    ) -> torch.Tensor:
        return scale_pixels(picture, scale, device, dtype)

    def run(self, part: RowPart, *inputs: torch.Tensor) -> torch.Tensor:
        return part.forward(self, *inputs)

    def multiply(
        self,
        linear: Linear,
        x: torch.Tensor,
        *,
        norm: Norm | None = None,
        activation: MlpActivation | None = None,
    ) -> torch.Tensor:
        if norm is not None:
            x = norm.normalize(x)
        if activation is not None:
            x = activation.apply(x)
        return linear.weight.multiply(x, linear.bias_data)

    def add_multiply(
        self, linear: Linear, x: torch.Tensor, delta: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + delta
        return x, self.multiply(linear, x, norm=norm)

    def attend(self, heads: torch.Tensor, sequences: PackedSequences, rotation: Rotation | None) -> torch.Tensor:
        q, k, v = heads.unbind(1)
        if rotation is not None:
            q, k = rotation.apply(q), rotation.apply(k)
        return packed_attention.attend(q, k, v, sequences).flatten(1)
