"""A decoder layer: two halves before and after attention, each built from parts.

Another family is another arrangement of parts: a class with the same method, built in `families.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from services.channel import rows_of_layer
from services.common.families.shape import Activation
from services.dense_worker.kernels.linear.activation import ACTIVATIONS
from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.kernels.norm.norm import HeadNorms, Norm
from services.dense_worker.model.operations import MlpInput, Operations, Residual
from services.dense_worker.parameters import Parameter


class BeforeAttention(Protocol):
    """The half of a layer that ends with qkv."""

    norm: Norm | None  # None: it reads the residual itself

    def forward(
        self, operations: Operations, residual: Residual, qkv_out: torch.Tensor | None
    ) -> tuple[torch.Tensor, Residual]:
        """residual [n, hidden] -> qkv [n, qkv_size], the residual; qkv is the layer's rows of `qkv_out`, if given."""


class AfterAttention(Protocol):
    """The half of a layer that begins with attention's output."""

    @property
    def attn_size(self) -> int:
        """Width of attention's output in this layer."""

    def forward(self, operations: Operations, attn_out: torch.Tensor, residual: Residual) -> Residual:
        """attn_out [n, attn_size], residual [n, hidden] -> the layer's residual."""


class Mlp(Protocol):
    """The part of a layer besides attention."""

    def activate(self, operations: Operations, residual: Residual) -> tuple[Residual, MlpInput]:
        """Returns the residual, and what `add` takes: the input of the last projection, or the MLP's output."""

    def add(
        self,
        operations: Operations,
        residual: Residual,
        activation: MlpInput,
        norm: Norm | None = None,
        multiplier: float = 1.0,
    ) -> Residual:
        """Adds the MLP's output to the residual, normalised if there is a norm, times multiplier."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer of a model."""

    before: BeforeAttention
    after: AfterAttention


@dataclass(frozen=True, slots=True)
class NormedQkv:
    """A norm, the merged projection, and in some families norms of q and k."""

    norm: Norm | None  # None: the projection reads the residual itself
    qkv: Linear  # q rows, then k, then v
    head_norms: HeadNorms | None

    def forward(
        self, operations: Operations, residual: Residual, qkv_out: torch.Tensor | None
    ) -> tuple[torch.Tensor, Residual]:
        """residual [n, hidden] -> qkv [n, qkv_size], in its rows of `qkv_out` where given, and the residual."""
        if qkv_out is not None:
            qkv_out = rows_of_layer(qkv_out, self.qkv.out_features)
        residual, qkv = operations.norm_linear(residual, self.norm, self.qkv, qkv_out)
        if self.head_norms is not None:
            qkv = operations.norm_heads(qkv, self.head_norms, is_in_place=qkv_out is not None)
        return qkv, residual


@dataclass(frozen=True, slots=True)
class AddedInput:
    """Adds norm(projection(activation(gate(x)) * input)) to the residual x; the input is the layer's own, by token."""

    layer: int
    gate: Linear
    projection: Linear
    norm: Norm
    activation: Activation

    def forward(self, operations: Operations, residual: Residual) -> Residual:
        """residual [n, hidden] -> the sum."""
        residual, gate = operations.norm_linear(residual, None, self.gate)
        product = ACTIVATIONS[self.activation](gate) * operations.layer_input(self.layer)
        return operations.linear_add(residual, self.projection, product, self.norm)


class OutputHalf:
    """An `AfterAttention` that begins with the output projection."""

    __slots__ = ()
    o: Linear

    @property
    def attn_size(self) -> int:
        return self.o.in_features


class GatedHalf:
    """An `AfterAttention` that gates attention's output, and then goes on as in any other layer."""

    __slots__ = ()
    after: AfterAttention

    @property
    def attn_size(self) -> int:
        return self.after.attn_size

    def gate(self, operations: Operations, attn_out: torch.Tensor) -> torch.Tensor:
        """attn_out [n, attn_size] -> the same, gated."""
        raise NotImplementedError

    def forward(self, operations: Operations, attn_out: torch.Tensor, residual: Residual) -> Residual:
        """attn_out [n, attn_size], residual [n, hidden] -> the layer's residual."""
        return self.after.forward(operations, self.gate(operations, attn_out), residual)


@dataclass(frozen=True, slots=True)
class SequentialResidual(OutputHalf):
    """Adds the output projection to the residual, and then the MLP of the sum. Either may be normalised before that."""

    o: Linear
    mlp: Mlp | None  # None: nothing follows attention
    norm_after_attention: Norm | None = None
    norm_after_mlp: Norm | None = None
    multiplier: float = 1.0  # of both additions
    added_input: AddedInput | None = None
    layer_scalar: Parameter | None = None  # [1], of the residual in the end

    def forward(self, operations: Operations, attn_out: torch.Tensor, residual: Residual) -> Residual:
        """attn_out [n, attn_size], residual [n, hidden] -> the layer's residual."""
        residual = operations.linear_add(residual, self.o, attn_out, self.norm_after_attention, self.multiplier)
        if self.mlp is not None:
            residual, activation = self.mlp.activate(operations, residual)
            residual = self.mlp.add(operations, residual, activation, self.norm_after_mlp, self.multiplier)
        if self.added_input is not None:
            residual = self.added_input.forward(operations, residual)
        if self.layer_scalar is None:
            return residual
        return operations.scale(residual, self.layer_scalar)


@dataclass(frozen=True, slots=True)
class AttentionAlone(OutputHalf):
    """Adds the output projection to the residual, and normalises the sum if there is a norm. No MLP follows."""

    o: Linear
    norm: Norm | None

    def forward(self, operations: Operations, attn_out: torch.Tensor, residual: Residual) -> Residual:
        """attn_out [n, attn_size], residual [n, hidden] -> the layer's residual."""
        residual = operations.linear_add(residual, self.o, attn_out)
        return residual if self.norm is None else operations.normalize_sum(residual, self.norm)


@dataclass(frozen=True, slots=True)
class NormedResidual(OutputHalf):
    """Adds the output projection to the residual and normalises the sum, and then the same with the MLP of that."""

    o: Linear
    attention_norm: Norm
    mlp: Mlp
    mlp_norm: Norm

    def forward(self, operations: Operations, attn_out: torch.Tensor, residual: Residual) -> Residual:
        """attn_out [n, attn_size], residual [n, hidden] -> the layer's residual."""
        residual = operations.linear_add(residual, self.o, attn_out)
        residual = operations.normalize_sum(residual, self.attention_norm)
        residual, activation = self.mlp.activate(operations, residual)
        return operations.normalize_sum(self.mlp.add(operations, residual, activation), self.mlp_norm)


@dataclass(frozen=True, slots=True)
class ParallelResidual(OutputHalf):
    """Adds the output projection and the MLP of the layer's input (arXiv:2204.02311, section 2)."""

    o: Linear
    mlp: Mlp

    def forward(self, operations: Operations, attn_out: torch.Tensor, residual: Residual) -> Residual:
        """attn_out [n, attn_size], residual [n, hidden] -> the layer's residual."""
        residual, activation = self.mlp.activate(operations, residual)
        residual = operations.linear_add(residual, self.o, attn_out)
        return self.mlp.add(operations, residual, activation)
