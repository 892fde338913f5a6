"""`PlainWeight`: an unquantized weight in the model's dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from services.dense_worker.parameters import Parameter, share_of_rows


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """A WeightFormat of one matrix in float32, bfloat16 or float16."""

    matrix: Parameter  # [out_features, in_features]

    @property
    def kind(self) -> torch.dtype:
        return self.matrix.data.dtype

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [n, in_features] -> [n, out_features] by torch; on CUDA that is cuBLAS."""
        return multiply_matrix(x, self.matrix.data, bias, out)

    def share(self, index: int, count: int) -> PlainWeight:
        """A view of some rows."""
        return share_of_rows(self, index, count)


def multiply_matrix(
    x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """x [n, in_features], matrix [out_features, in_features], all of one dtype -> [n, out_features], `out` if given."""
    if out is None:
        return F.linear(x, matrix, bias)
    if bias is None:
        return torch.mm(x, matrix.t(), out=out)
    return torch.addmm(bias, x, matrix.t(), out=out)
