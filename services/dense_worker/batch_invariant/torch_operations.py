"""`BatchInvariantTorchOperations`: `TorchOperations` on a CPU whose rows do not depend on each other to the last bit.

Of torch's operators on a CPU, measured with MKL and oneDNN, those that add within a row (norms, softmax, log_softmax)
give a row the same bits in every batch. Two kinds do not:

- Products choose kernel and order of additions by the number of rows. With a constant number of rows, padded where
  there are fewer, a row's bits depend neither on the other rows nor on its place among them.
- SiLU, sigmoid and GELU by tanh compute with vectors, and the last few elements of a thread's share with another exp.
  Where these elements lie depends on the number of rows, unless a call has one row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from services.dense_worker.kernels.experts.routed_experts import RoutedExperts
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.kernels.lora.tensors import LoraStore
from services.dense_worker.kernels.norm.norm import Norm, RmsNorm
from services.dense_worker.model.operations import Residual
from services.dense_worker.model.torch_operations import TorchOperations

ROWS_PER_PRODUCT = 16


class BatchInvariantTorchOperations(TorchOperations):
    """Reads weights once for every `ROWS_PER_PRODUCT` rows. `lora` must compute rows one at a time, too."""

    def __init__(self, lora: LoraStore | None = None) -> None:
        super().__init__(lora)
        self._tiles: dict[tuple[int, torch.dtype], torch.Tensor] = {}  # [ROWS_PER_PRODUCT, in_features], aligned

    def linear(self, linear: Linear, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The product in pieces of `ROWS_PER_PRODUCT` rows."""
        product = x.new_empty(len(x), linear.out_features) if out is None else out
        tile = self._tiles.get((linear.in_features, x.dtype))
        if tile is None:
            tile = self._tiles[linear.in_features, x.dtype] = x.new_zeros(ROWS_PER_PRODUCT, linear.in_features)
        for rows, part in zip(x.split(ROWS_PER_PRODUCT), product.split(ROWS_PER_PRODUCT), strict=True):
            tile[: len(rows)].copy_(rows)
            part.copy_(linear.weight.multiply(tile, linear.bias_data)[: len(rows)])
        if self._lora is not None and self._lora.is_active:
            self._lora.add(linear, x, product)
        return product

    def norm_activate(
        self, residual: Residual, norm: Norm | None, linear: Linear, activation: MlpActivation
    ) -> tuple[Residual, torch.Tensor]:
        """The activation row by row."""
        residual, product = self.norm_linear(residual, norm, linear)
        return residual, _row_by_row(activation.apply, product)

    def mix_experts(
        self,
        x: torch.Tensor,
        experts: RoutedExperts,
        shared: torch.Tensor | None,
        routed_by: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Router and experts row by row: how many rows an expert gets depends on all of them."""
        total = _row_by_row(experts.mix, x, x if routed_by is None else routed_by)
        return (total if shared is None else total.add_(shared)).to(x.dtype)

    def apply_gate(self, x: torch.Tensor, norm: RmsNorm | None = None) -> torch.Tensor:
        """Row by row, as activations are."""

        def gated(row: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            one_row = TorchOperations()
            one_row.keep_gate(gate)
            return one_row.apply_gate(row, norm)

        return _row_by_row(gated, x, self.kept_gate())


def _row_by_row(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """The function's results for single rows, joined. All tensors have as many rows, at least one."""
    return torch.cat([function(*rows) for rows in zip(*(each.split(1) for each in tensors), strict=True)])
