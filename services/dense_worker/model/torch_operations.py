"""`TorchOperations`: unfused operators in torch, on any device: the reference, and what torch.export records."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from services.dense_worker.kernels.experts.routed_experts import RoutedExperts
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.kernels.lora.tensors import LoraStore
from services.dense_worker.kernels.norm.norm import HeadNorms, Norm, RmsNorm
from services.dense_worker.model.operations import Residual
from services.dense_worker.parameters import Parameter


class TorchOperations:
    """Operations that write in place only to `out`. Numerics follow Hugging Face: the residual has the model's dtype,
    norms compute in float32."""

    def __init__(self, lora: LoraStore | None = None) -> None:
        self._lora = lora  # None: no row has an adapter
        self._positions: torch.Tensor | None = None  # int64 [num_tokens] of the step; None: no part reads them
        self._layer_inputs: torch.Tensor | None = None  # [n, num_layers, size] of the step; None: no layer reads them
        self._gate: torch.Tensor | None = None  # [n, size] of the last layer that has one
        self._selected_rows: torch.Tensor | None = None  # of the layers' inputs and of the gate; None: all

    def linear(self, linear: Linear, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The product of any linear layer: x [n, in_features] -> [n, out_features], in `out` if given."""
        product = linear.weight.multiply(x, linear.bias_data, out)
        if self._lora is not None and self._lora.is_active:
            self._lora.add(linear, x, product)
        return product

    def embed(self, table: Parameter, token_ids: torch.Tensor) -> Residual:
        """Looks up a row of the table for each token."""
        return Residual(F.embedding(token_ids, table.data))

    def begin_rows(self, num_rows: int) -> None:
        """Nothing: the first operation of a step prepares no other."""

    def set_positions(self, positions: torch.Tensor) -> None:
        """Keeps the position of each token of the step, int64 [num_tokens], on the model's device."""
        self._positions = positions

    def positions(self, num_tokens: int) -> torch.Tensor:
        """The first of the positions that `set_positions` was given."""
        assert self._positions is not None, "positions were not prepared for the step"
        return self._positions[:num_tokens]

    def norm_linear(
        self, residual: Residual, norm: Norm | None, linear: Linear, out: torch.Tensor | None = None
    ) -> tuple[Residual, torch.Tensor]:
        """Norm, then product; the residual stays as it is."""
        return residual, self.linear(linear, _normalized(residual, norm), out)

    def norm_activate(
        self, residual: Residual, norm: Norm | None, linear: Linear, activation: MlpActivation
    ) -> tuple[Residual, torch.Tensor]:
        """Norm, product, then the activation."""
        return residual, activation.apply(self.linear(linear, _normalized(residual, norm)))

    def linear_add(
        self,
        residual: Residual,
        linear: Linear,
        x: torch.Tensor,
        norm: Norm | None = None,
        multiplier: float = 1.0,
    ) -> Residual:
        """A new tensor: the residual plus the product."""
        return self.add(residual, self.linear(linear, x), norm, multiplier)

    def normalize(self, residual: Residual, norm: Norm | None) -> tuple[Residual, torch.Tensor]:
        """The residual stays as it is."""
        return residual, _normalized(residual, norm)

    def normalize_sum(self, residual: Residual, norm: Norm) -> Residual:
        """A new tensor."""
        return Residual(norm.normalize(residual.hidden))

    def mix_experts(
        self,
        x: torch.Tensor,
        experts: RoutedExperts,
        shared: torch.Tensor | None,
        routed_by: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Adds up in float32, and rounds once."""
        total = experts.mix(x, routed_by)
        return (total if shared is None else total.add_(shared)).to(x.dtype)

    def activate_experts(
        self, residual: Residual, norm: Norm | None, experts: RoutedExperts
    ) -> tuple[Residual, torch.Tensor]:
        """The sum."""
        residual, x = self.normalize(residual, norm)
        return residual, self.mix_experts(x, experts, None)

    def add_experts(
        self,
        residual: Residual,
        activated: torch.Tensor,
        norm: Norm | None,
        multiplier: float,
    ) -> Residual:
        """A new tensor."""
        return self.add(residual, activated, norm, multiplier)

    def add(
        self, residual: Residual, change: torch.Tensor, norm: Norm | None = None, multiplier: float = 1.0
    ) -> Residual:
        """A new tensor."""
        if norm is not None:
            change = norm.normalize(change)
        return Residual(residual.hidden + (change if multiplier == 1.0 else change * multiplier))

    def keep_layer_inputs(self, inputs: torch.Tensor) -> None:
        """Keeps the tensor itself."""
        self._layer_inputs, self._selected_rows = inputs, None

    def layer_input(self, layer: int) -> torch.Tensor:
        """A view, or a copy of the selected rows."""
        assert self._layer_inputs is not None, "the layers' inputs were not prepared for the step"
        of_layer = self._layer_inputs[:, layer]
        return of_layer if self._selected_rows is None else of_layer.index_select(0, self._selected_rows)

    def keep_gate(self, gate: torch.Tensor) -> None:
        """Keeps the tensor itself."""
        self._gate, self._selected_rows = gate, None

    def kept_gate(self) -> torch.Tensor:
        """The tensor itself, or a copy of the selected rows."""
        assert self._gate is not None, "no half of a layer before attention has kept a gate"
        return self._gate if self._selected_rows is None else self._gate.index_select(0, self._selected_rows)

    def apply_gate(self, x: torch.Tensor, norm: RmsNorm | None = None) -> torch.Tensor:
        """A new tensor. The sigmoid is rounded to x's dtype, SiLU is not."""
        gate = self.kept_gate()
        if norm is None:
            return x * torch.sigmoid(gate)
        normed = norm.normalize(x.unflatten(1, (-1, norm.weight.data.shape[0]))).flatten(1)
        return (normed * F.silu(gate.float())).to(x.dtype)

    def scale(self, residual: Residual, factor: Parameter) -> Residual:
        """A new tensor."""
        return Residual(residual.hidden * factor.data)

    def norm_heads(self, qkv: torch.Tensor, norms: HeadNorms, is_in_place: bool) -> torch.Tensor:
        """Splits qkv, normalises its parts, and joins or writes them back."""
        parts = qkv.split(norms.sizes, dim=1)
        normed = norms.normalize(parts)
        if not is_in_place:
            return torch.cat(normed, dim=1)
        for place, part in zip(parts, normed, strict=True):
            if part is not place:
                place.copy_(part)
        return qkv

    def place_latent(self, heads: torch.Tensor, query: torch.Tensor, key: torch.Tensor, norm: Norm) -> None:
        """By copies."""
        rank = norm.weight.data.shape[0]
        rotated_dim = heads.shape[2] - rank
        heads[:, :-1, :rotated_dim].copy_(query[..., -rotated_dim:])
        heads[:, -1, :rotated_dim].copy_(key[:, rank:])
        heads[:, -1, rotated_dim:].copy_(norm.normalize(key[:, :rank]))

    def select_rows(
        self, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, Residual]:
        """Copies the rows of both."""
        if self._lora is not None and self._lora.is_active:
            self._lora.select(rows)
        self._selected_rows = rows
        return attn_out.index_select(0, rows), Residual(residual.index_select(0, rows))

    def logits(
        self, residual: Residual, norm: Norm | None, lm_head: Linear, hidden_out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Norm, then product, then to float32."""
        hidden = _normalized(residual, norm)
        if hidden_out is not None:
            hidden_out.copy_(hidden)
        return self.linear(lm_head, hidden).float()

    def settle(self, residual: Residual) -> torch.Tensor:
        """Nothing is ever left to be added here."""
        return residual.hidden


def _normalized(residual: Residual, norm: Norm | None) -> torch.Tensor:
    return residual.hidden if norm is None else norm.normalize(residual.hidden)
