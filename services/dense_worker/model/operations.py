"""`Operations`: the operations that layers are written with. There is one implementation in torch and one for CUDA.

Most of them combine several operators, because the CUDA kernels fuse these: a norm with the following product, a
product with the addition to the residual. For operators that no implementation fuses, a part may use torch's functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.kernels.norm.norm import HeadNorms, Norm, RmsNorm
from services.dense_worker.parameters import Parameter

if TYPE_CHECKING:
    from services.dense_worker.kernels.experts.routed_experts import RoutedExperts
    from services.dense_worker.kernels.norm.norm import SplitNorm


class Residual(NamedTuple):
    """The sum [n, hidden] that the parts of a layer add to. An operation that takes a residual returns the next one."""

    hidden: torch.Tensor  # [n, hidden]; an implementation may write it in place
    delta: torch.Tensor | None = None  # [n, hidden]: not added yet; the next norm adds it in its own pass
    delta_norm: Norm | None = None  # of the delta, before it is added
    delta_multiplier: float = 1.0  # of the delta, after its norm
    split_norm: SplitNorm | None = None  # of the sum: what the product that wrote it has done of its norm


class Unactivated(NamedTuple):
    """Rows of which the product that reads them computes the activation first."""

    rows: torch.Tensor  # [n, in_features], if gated [n, 2 * in_features]
    activation: MlpActivation


class ActivatedExperts(NamedTuple):
    """Experts whose last products are not computed yet: an operation keeps what they read until the sum is added."""

    experts: RoutedExperts


MlpInput = torch.Tensor | Unactivated  # of an MLP's last product


class Operations(Protocol):
    """The operations of a layer, for n tokens. All linear layers are multiplied in one place, which chooses kernels."""

    def embed(self, table: Parameter, token_ids: torch.Tensor) -> Residual:
        """table [vocab, hidden], token_ids int64 [n] -> a new residual. The first operation of a step."""

    def begin_rows(self, num_rows: int) -> None:
        """In place of `embed`, in a step whose residual comes from another process."""

    def set_positions(self, positions: torch.Tensor) -> None:
        """Those of the next step's tokens, int64 [num_tokens], for models whose embedding reads them."""

    def positions(self, num_tokens: int) -> torch.Tensor:
        """The position of each of the step's tokens in its sequence, int64 [num_tokens]."""

    def norm_linear(
        self, residual: Residual, norm: Norm | None, linear: Linear, out: torch.Tensor | None = None
    ) -> tuple[Residual, torch.Tensor]:
        """Norm (None: none), then product -> the residual, and the product [n, out_features], in `out` if given."""

    def norm_activate(
        self, residual: Residual, norm: Norm | None, linear: Linear, activation: MlpActivation
    ) -> tuple[Residual, MlpInput]:
        """Norm, then product -> the residual, and the activation of the product, which may not be computed yet."""

    def linear(self, linear: Linear, x: MlpInput) -> torch.Tensor:
        """The product of x [n, in_features] alone, [n, out_features]."""

    def linear_add(
        self,
        residual: Residual,
        linear: Linear,
        x: MlpInput,
        norm: Norm | None = None,
        multiplier: float = 1.0,
    ) -> Residual:
        """Adds the product of x [n, in_features] to the residual, normalised if there is a norm, times multiplier."""

    def normalize(self, residual: Residual, norm: Norm | None) -> tuple[Residual, torch.Tensor]:
        """The residual, and its norm (None: itself) [n, hidden], which `mix_experts` may still read."""

    def normalize_sum(self, residual: Residual, norm: Norm) -> Residual:
        """A residual that is the norm of this one, with all additions done."""

    def mix_experts(
        self,
        x: torch.Tensor,
        experts: RoutedExperts,
        shared: torch.Tensor | None,
        routed_by: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [n, hidden] -> the sum of the experts chosen for each token and of `shared`, in x's dtype.

        `shared` (float32 [n, hidden]) may be overwritten. The router reads `routed_by` [n, hidden], or x.
        """

    def activate_experts(
        self, residual: Residual, norm: Norm | None, experts: RoutedExperts
    ) -> tuple[Residual, torch.Tensor | ActivatedExperts]:
        """Norm, then `mix_experts` -> the residual, and the sum, which may not be computed before `add_experts`."""

    def add_experts(
        self,
        residual: Residual,
        activated: torch.Tensor | ActivatedExperts,
        norm: Norm | None,
        multiplier: float,
    ) -> Residual:
        """Adds what `activate_experts` returned last, as `add` does."""

    def add(
        self, residual: Residual, change: torch.Tensor, norm: Norm | None = None, multiplier: float = 1.0
    ) -> Residual:
        """Adds change [n, hidden] to the residual, normalised if there is a norm, times multiplier."""

    def keep_layer_inputs(self, inputs: torch.Tensor) -> None:
        """Keeps the layers' inputs of the step's tokens, [n, num_layers, size], until the next step."""

    def layer_input(self, layer: int) -> torch.Tensor:
        """What `keep_layer_inputs` was given for a layer, [n, size]; after `select_rows`, its rows alone."""

    def keep_gate(self, gate: torch.Tensor) -> None:
        """Keeps a layer's gate of the step's tokens, [n, size], until the half after attention reads it."""

    def kept_gate(self) -> torch.Tensor:
        """What `keep_gate` was given last, [n, size]; after `select_rows`, its rows alone."""

    def apply_gate(self, x: torch.Tensor, norm: RmsNorm | None = None) -> torch.Tensor:
        """x [n, size] times the sigmoid of what `keep_gate` was given last; after `select_rows`, of its rows alone.

        With a norm, whose weight is as long as a head: each head of x, normalised, times SiLU of the gate.
        """

    def scale(self, residual: Residual, factor: Parameter) -> Residual:
        """The residual, with all additions done, times factor [1]."""

    def norm_heads(self, qkv: torch.Tensor, norms: HeadNorms, is_in_place: bool) -> torch.Tensor:
        """qkv [n, qkv_size], n at least 1 -> qkv with normalised heads; `is_in_place`: in the same tensor."""

    def place_latent(self, heads: torch.Tensor, query: torch.Tensor, key: torch.Tensor, norm: Norm) -> None:
        """Writes all but the absorbed queries of latent attention to `heads`, [n, num_heads + 1, rotated_dim + rank].

        query: [n, num_heads, plain_dim + rotated_dim], of which the rotated part goes to the beginning of each head.
        key: [n, rank + rotated_dim]; its rotated part begins the last head, the latent vector follows, normalised.
        """

    def select_rows(
        self, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, Residual]:
        """Copies of rows (int64 [r]) of attn_out [n, attn_size] and of the residual [n, hidden]."""

    def logits(
        self, residual: Residual, norm: Norm | None, lm_head: Linear, hidden_out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Norm (None: none), then product, rounded to the model's dtype -> [n, vocab] in it or float32, a new tensor.

        What the norm gives, [n, hidden], is written to `hidden_out` if that is given.
        """

    def settle(self, residual: Residual) -> torch.Tensor:
        """The residual [n, hidden] with all additions done."""
