"""`Operations`: what a layer is written in. Torch has one implementation of it, CUDA another.

Most are several operators in one, because the CUDA kernels fuse them: a norm with the product after it, a product
with the addition to the residual. What no implementation fuses, a part may do with torch's own functions.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from services.dense_worker.model.linear import Linear
from services.dense_worker.model.norm import HeadNorms, RmsNorm
from services.dense_worker.model.parameters import Parameter


class Residual(NamedTuple):
    """The stream [n, hidden] that the parts of a layer add to. An operation that takes one gives what replaces it."""

    hidden: torch.Tensor  # [n, hidden]; an implementation may write it in place
    delta: torch.Tensor | None = None  # [n, hidden]: still to be added; the next norm does it in its own pass


class Operations(Protocol):
    """The steps of a layer, for n tokens. Linear layers are multiplied in one place, which chooses the kernel."""

    def embed(self, table: Parameter, token_ids: torch.Tensor) -> Residual:
        """table [vocab, hidden], token_ids int64 [n] -> a new residual."""

    def norm_linear(
        self, residual: Residual, norm: RmsNorm, linear: Linear, out: torch.Tensor | None = None
    ) -> tuple[Residual, torch.Tensor]:
        """The residual, and norm then product [n, out_features]: `out`, written in place, where it is given."""

    def norm_swiglu(self, residual: Residual, norm: RmsNorm, gate_up: Linear) -> tuple[Residual, torch.Tensor]:
        """The residual, and norm, product, SiLU(gate) * up [n, out_features / 2] (arXiv:2002.05202)."""

    def linear_add(self, residual: Residual, linear: Linear, x: torch.Tensor) -> Residual:
        """The product of x [n, in_features] is added to the residual."""

    def norm_heads(self, qkv: torch.Tensor, norms: HeadNorms, is_in_place: bool) -> torch.Tensor:
        """qkv [n, qkv_size], n at least 1 -> the same with q and k heads normalised; `is_in_place`: the very tensor."""

    def select_rows(
        self, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, Residual]:
        """rows int64 [r] of attn_out [n, attn_size] and residual [n, hidden], both copied."""

    def logits(self, residual: Residual, norm: RmsNorm, lm_head: Linear) -> torch.Tensor:
        """Norm, then product, rounded to the model's dtype: float32 [n, vocab], the caller's to keep."""

    def settle(self, residual: Residual) -> torch.Tensor:
        """The residual [n, hidden], nothing to be added any more."""
