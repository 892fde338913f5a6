"""`VisionLayer`: a layer of a tower, which all families have: attention and an MLP, each behind a norm.

`PatchEmbedding` makes rows of patches, and `Projector` makes rows of the prompt of a tower's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional as F

from services.common.families.kinds import Activation
from services.dense_worker.encoders.packed_attention import PackedSequences
from services.dense_worker.encoders.vision.operations import Rotation, RowPart, TowerOperations
from services.dense_worker.kernels.linear.activation import ACTIVATIONS, MlpActivation
from services.dense_worker.kernels.linear.linear import Cut, Linear, Projection
from services.dense_worker.kernels.norm.norm import Norm
from services.dense_worker.model.allocator import WeightAllocator
from services.dense_worker.parameters import Parameter

PROJECTOR = "multi_modal_projector"  # in checkpoints


@dataclass(frozen=True, slots=True)
class PatchEmbedding(RowPart):
    """A convolution over patches that do not overlap, as a matrix."""

    matrix: Parameter  # [hidden, numbers of a patch]
    bias: Parameter | None  # [hidden]
    segment: ClassVar[str] = "embed"

    @property
    def row_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"patches": (self.matrix.data.shape[1],)}

    def forward(self, operations: TowerOperations, patches: torch.Tensor) -> torch.Tensor:
        """patches [n, numbers of a patch] -> [n, hidden]"""
        return F.linear(patches, self.matrix.data, None if self.bias is None else self.bias.data)


@dataclass(frozen=True, slots=True)
class LayerStart(RowPart):
    """What precedes attention: a norm and the merged projection. Queries and keys may have norms over all heads."""

    norm: Norm
    qkv: Linear  # q rows, then k, then v
    qk_norms: tuple[Norm, ...] = ()  # of q and of k; empty: none
    segment: ClassVar[str] = "start"

    @property
    def row_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"x": (self.qkv.in_features,)}

    def forward(self, operations: TowerOperations, x: torch.Tensor) -> torch.Tensor:
        """x [n, hidden] -> [n, 3 * hidden]"""
        qkv = operations.multiply(self.qkv, x, norm=self.norm)
        if not self.qk_norms:
            return qkv
        q, k, v = qkv.split(self.qkv.out_features // 3, dim=1)
        normed = (norm.normalize(each) for norm, each in zip(self.qk_norms, (q, k), strict=True))
        return torch.cat((*normed, v), dim=1)


@dataclass(frozen=True, slots=True)
class LayerEnd(RowPart):
    """What follows attention: x + scale * o(attended), then the same with an MLP of two matrices, or of three."""

    o: Linear
    norm: Norm
    mlp_in: Linear  # gate rows, then up rows; without a gate up alone
    down: Linear
    activation: MlpActivation
    scales: tuple[Parameter, ...] = ()  # [hidden], of attention and of the MLP; empty: none
    segment: ClassVar[str] = "end"

    @property
    def row_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"x": (self.o.out_features,), "attended": (self.o.in_features,)}

    def forward(self, operations: TowerOperations, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """x [n, hidden], attended [n, hidden] -> [n, hidden]"""
        delta = self._scale(operations.multiply(self.o, attended), 0)
        x, inner = operations.add_multiply(self.mlp_in, x, delta, self.norm)
        return x + self._scale(operations.multiply(self.down, inner, activation=self.activation), 1)

    def _scale(self, delta: torch.Tensor, index: int) -> torch.Tensor:
        return delta * self.scales[index].data if self.scales else delta


@dataclass(frozen=True, slots=True)
class VisionLayer:
    """The parts before and after the attention of each sequence to itself."""

    start: LayerStart
    end: LayerEnd
    num_heads: int

    def forward(
        self,
        x: torch.Tensor,
        sequences: PackedSequences,
        operations: TowerOperations,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        """x [num_tokens, hidden] of sequences that see themselves, which may be overwritten -> the same shape."""
        heads = operations.run(self.start, x).view(len(x), 3, self.num_heads, -1)
        return operations.run(self.end, x, operations.attend(heads, sequences, rotation))


@dataclass(frozen=True, slots=True)
class Projector(RowPart):
    """second · activation(first · norm(x))"""

    norm: Norm | None
    first: Linear
    second: Linear
    activation: Activation
    segment: ClassVar[str] = "project"

    @property
    def row_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"x": (self.first.in_features,)}

    def forward(self, operations: TowerOperations, x: torch.Tensor) -> torch.Tensor:
        """x [n, hidden] -> [n, width]"""
        if self.norm is not None:
            x = self.norm.normalize(x)
        return multiply(self.second, ACTIVATIONS[self.activation](multiply(self.first, x)))


def build_projector(
    in_features: int,
    width: int,
    activation: Activation,
    has_bias: bool,
    allocator: WeightAllocator,
    norm: Norm | None = None,
) -> Projector:
    """The matrices, uninitialised, with the names of their tensors in checkpoints."""
    first, second = (Projection(f"{PROJECTOR}.linear_{number}", width) for number in (1, 2))
    return Projector(
        norm,
        allocator.linear("first", in_features, (first,), Cut.OUT, has_bias),
        allocator.linear("second", width, (second,), Cut.OUT, has_bias),
        activation,
    )


def multiply(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    """x [..., in_features] -> [..., out_features]."""
    return linear.weight.multiply(x, linear.bias_data)
