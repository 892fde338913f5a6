"""`CudaOperations`: what a layer is written in, by fused kernels, in few passes over memory.

All work goes to the current stream, at fixed addresses and without waiting, so that it can be captured in a CUDA
graph. A product that its kernel cannot add to the residual is left in `Residual.delta`, for the next norm to add. So is
one that is normalised or multiplied before: one kernel passes over a row for the norm after it and for the one before
the next product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from services.common.model_config import ModelConfig
from services.dense_worker.backends.cuda_linear import CudaLinear
from services.dense_worker.kernels.experts.cuda_experts import CudaExperts
from services.dense_worker.kernels.experts.routed_experts import RoutedExperts
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.kernels.linear.linear_choice import ROW_BUCKETS, LinearKernel
from services.dense_worker.kernels.linear.triton_activation import activate
from services.dense_worker.kernels.norm.norm import HeadNorms, Norm, RmsNorm, SplitNorm, num_squares
from services.dense_worker.kernels.norm.triton_gate import apply_gate
from services.dense_worker.kernels.norm.triton_latent import place_latent
from services.dense_worker.kernels.norm.triton_norm import add_norm, normalize_heads
from services.dense_worker.kernels.triton_launch import KernelLauncher
from services.dense_worker.model.operations import ActivatedExperts, MlpInput, Residual, Unactivated
from services.dense_worker.parameters import Parameter

if TYPE_CHECKING:
    from services.dense_worker.batch_invariant.cuda_linear import BatchInvariantLinear
    from services.dense_worker.kernels.lora.cuda_lora import CudaLora


class CudaOperations:
    """Operations for up to `max_num_tokens` tokens, on one stream. Residuals are written in place.

    Workspaces hold what lives within a half of a layer; logits, residuals and selected rows are new tensors, which
    under capture come from the graph's pool.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_num_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        lora: CudaLora | None = None,
        *,
        is_deterministic: bool = False,
    ) -> None:
        """`is_deterministic`: products have one order of additions, and so must the deltas of `lora`."""

        def workspace(width: int) -> torch.Tensor:
            return torch.empty(max_num_tokens, width, dtype=dtype, device=device)

        self._hidden = workspace(config.hidden_size)  # normalised, or about to be added to the residual
        experts = config.parts.experts
        shared_size = 0 if experts is None else experts.shared_intermediate_size or 0
        sizes = config.parts.layer_intermediate_sizes
        widest = (1 + config.parts.is_gated) * max(config.intermediate_size, shared_size, *sizes)
        self._activation = workspace(-(-widest // 8) * 8)  # so that rows begin at multiples of 16 bytes
        self._positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)  # of the step's tokens
        self._num_rows = 0  # of the layers' inputs
        inputs = config.parts.layer_inputs
        self._layer_inputs = None  # [max_num_tokens, num_layers, size]; None: no layer reads them
        if inputs is not None:
            self._layer_inputs = workspace(inputs.num_layers * inputs.size).unflatten(1, (-1, inputs.size))
        self._gate: torch.Tensor | None = None  # [n, size] of the last layer that has one; of the graph's pool
        self._selected_rows: torch.Tensor | None = None  # of the layers' inputs and of the gate; None: the first ones
        self._squares = torch.zeros(ROW_BUCKETS[-1], num_squares(config.hidden_size), device=device)  # of `SplitNorm`
        self._following: dict[int, tuple[Norm, Linear]] = {}  # by id of a product that adds to the residual
        self.launcher = KernelLauncher(device)
        self._lora = lora  # None: no row has an adapter
        self.products: CudaLinear | BatchInvariantLinear
        if is_deterministic:
            from services.dense_worker.batch_invariant.cuda_linear import BatchInvariantLinear

            self.products = BatchInvariantLinear(self.launcher, device, dtype, lora)
        else:
            self.products = CudaLinear(self.launcher, device, dtype, lora)
        self.experts = None  # None: the model has none
        if experts is not None:
            self.experts = CudaExperts(
                self.launcher, config, experts, max_num_tokens, dtype, device, is_deterministic=is_deterministic
            )

    def join(self, before: Linear, norm: Norm, after: Linear) -> None:
        """`after` always multiplies the norm of the residual to which `before` has added: they may share the norm."""
        self._following[id(before)] = norm, after

    def embed(self, table: Parameter, token_ids: torch.Tensor) -> Residual:
        """Copies a row of the table for each token into a new tensor."""
        if self.experts is not None:
            self.experts.skips_padding = True
        self.begin_rows(len(token_ids))
        return Residual(_copy_rows(table.data, token_ids))

    def begin_rows(self, num_rows: int) -> None:
        """Starts the products of adapters, if any row has one."""
        if self._lora is not None and self._lora.is_active:
            self._lora.start(num_rows)

    def set_positions(self, positions: torch.Tensor) -> None:
        """Enqueues a copy of the step's positions, int64 [num_tokens], to where captured graphs read them."""
        self._positions[: len(positions)].copy_(positions, non_blocking=True)

    def positions(self, num_tokens: int) -> torch.Tensor:
        """A view of what `set_positions` wrote; padding has the positions of an earlier step."""
        return self._positions[:num_tokens]

    def norm_linear(
        self, residual: Residual, norm: Norm | None, linear: Linear, out: torch.Tensor | None = None
    ) -> tuple[Residual, torch.Tensor]:
        """One kernel for one streamed row; otherwise the norm's, which also adds the delta, and the product's."""
        hidden = residual.hidden
        if out is None:
            out = torch.empty(len(hidden), linear.out_features, dtype=hidden.dtype, device=hidden.device)
        kernel = self.products.kernel(linear, len(hidden))
        return self._norm_multiply(kernel, residual, norm, linear, out), out

    def norm_activate(
        self, residual: Residual, norm: Norm | None, linear: Linear, activation: MlpActivation
    ) -> tuple[Residual, MlpInput]:
        """Like `norm_linear`. The product's kernel computes the activation, or it is left to the next product.

        The result lies in a workspace.
        """
        num_rows = len(residual.hidden)
        rows = self._activation[:num_rows, : linear.out_features]
        kernel = self.products.kernel(linear, num_rows)
        if self.products.fuses_activation_after(kernel, linear, num_rows, activation):
            out = rows[:, : linear.out_features // (1 + activation.is_gated)]
            return self._norm_multiply(kernel, residual, norm, linear, out, activation), out
        return self._norm_multiply(kernel, residual, norm, linear, rows), Unactivated(rows, activation)

    def linear(self, linear: Linear, x: MlpInput) -> torch.Tensor:
        """The kernel of the layer's choice -> a new tensor."""
        rows = x.rows if isinstance(x, Unactivated) else x
        out = torch.empty(len(rows), linear.out_features, dtype=rows.dtype, device=rows.device)
        self._multiply(linear, x, out)
        return out

    def linear_add(
        self,
        residual: Residual,
        linear: Linear,
        x: MlpInput,
        norm: Norm | None = None,
        multiplier: float = 1.0,
    ) -> Residual:
        """Adds to the residual in place, if the kernel does that; any other leaves the product as the delta.

        So does a product that is normalised or multiplied before it is added.
        """
        hidden = self.settle(residual)
        kernel = self.products.kernel(linear, len(hidden))
        if self.products.adds_residual(kernel, linear, len(hidden)) and norm is None and multiplier == 1.0:
            split = self._split_norm(linear, hidden)
            self._multiply(linear, x, hidden, residual=hidden, norm_after=split)
            return Residual(hidden, split_norm=split)
        delta = self._hidden[: len(hidden)]
        self._multiply(linear, x, delta)
        return self.add(Residual(hidden), delta, norm, multiplier)

    def normalize(self, residual: Residual, norm: Norm | None) -> tuple[Residual, torch.Tensor]:
        """Adds the delta in the norm's kernel. The result lies in a workspace, or is the residual itself."""
        if norm is None:
            hidden = self.settle(residual)
            return Residual(hidden), hidden
        normed = self._hidden[: len(residual.hidden)]  # may be `delta`
        self._normalize(residual, norm, normed)
        return Residual(residual.hidden), normed

    def normalize_sum(self, residual: Residual, norm: Norm) -> Residual:
        """In place."""
        hidden = self.settle(residual)
        add_norm(self.launcher, hidden, None, norm, hidden)
        return Residual(hidden)

    def mix_experts(
        self,
        x: torch.Tensor,
        experts: RoutedExperts,
        shared: torch.Tensor | None,
        routed_by: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The kernels of `CudaExperts` -> a new tensor."""
        assert self.experts is not None, "the model has no experts"
        return self.experts.mix(x, experts, shared, routed_by)

    def activate_experts(
        self, residual: Residual, norm: Norm | None, experts: RoutedExperts
    ) -> tuple[Residual, torch.Tensor | ActivatedExperts]:
        """The sum of few tokens is left to the kernel that adds it to the residual."""
        hidden = residual.hidden
        assert self.experts is not None, "the model has no experts"
        if not self.experts.has_few(experts, len(hidden)):
            residual, x = self.normalize(residual, norm)
            return residual, self.mix_experts(x, experts, None)
        if residual.delta is not None:  # the norm's kernel adds it
            residual, hidden = self.normalize(residual, norm)
            norm = None
        self.experts.activate_few(hidden, norm, experts, self._hidden[: len(hidden)])
        return residual, ActivatedExperts(experts)

    def add_experts(
        self,
        residual: Residual,
        activated: torch.Tensor | ActivatedExperts,
        norm: Norm | None,
        multiplier: float,
    ) -> Residual:
        """In place in the residual, or as its delta."""
        if isinstance(activated, torch.Tensor):
            return self.add(residual, activated, norm, multiplier)
        assert self.experts is not None, "the model has no experts"
        hidden = self.settle(residual)
        if norm is None and multiplier == 1.0:
            self.experts.add_few(activated.experts, hidden, hidden)
            return Residual(hidden)
        change = torch.empty_like(hidden)
        self.experts.add_few(activated.experts, None, change)
        return self.add(Residual(hidden), change, norm, multiplier)

    def add(
        self, residual: Residual, change: torch.Tensor, norm: Norm | None = None, multiplier: float = 1.0
    ) -> Residual:
        """Leaves `change` as the delta."""
        return Residual(self.settle(residual), change, norm, multiplier)

    def keep_layer_inputs(self, inputs: torch.Tensor) -> None:
        """Copies them to where captured graphs read them."""
        self._layer_inputs[: len(inputs)].copy_(inputs)
        self._num_rows, self._selected_rows = len(inputs), None

    def layer_input(self, layer: int) -> torch.Tensor:
        """A view, or a copy of the selected rows."""
        if self._selected_rows is not None:
            return self._layer_inputs[:, layer].index_select(0, self._selected_rows)
        return self._layer_inputs[: self._num_rows, layer]

    def keep_gate(self, gate: torch.Tensor) -> None:
        """Keeps the tensor itself."""
        self._gate, self._selected_rows = gate, None

    def kept_gate(self) -> torch.Tensor:
        """The tensor itself, or a copy of the selected rows."""
        assert self._gate is not None, "no half of a layer before attention has kept a gate"
        return self._gate if self._selected_rows is None else self._gate.index_select(0, self._selected_rows)

    def apply_gate(self, x: torch.Tensor, norm: RmsNorm | None = None) -> torch.Tensor:
        """In one kernel, into a new tensor; selected rows of the gate are copied before."""
        gate = self.kept_gate()
        out = torch.empty_like(x)
        weight, eps = (None, 0.0) if norm is None else (norm.weight.data, norm.eps)
        apply_gate(self.launcher, x, gate, weight, eps, out)
        return out

    def scale(self, residual: Residual, factor: Parameter) -> Residual:
        """In place."""
        return Residual(self.settle(residual).mul_(factor.data))

    def norm_heads(self, qkv: torch.Tensor, norms: HeadNorms, is_in_place: bool) -> torch.Tensor:
        """Always in place: a product that is not the caller's is this operation's to write."""
        if not norms.cover_all_heads:
            normalize_heads(self.launcher, qkv, norms)
            return qkv
        for part, norm in zip(qkv.split(norms.sizes, dim=1), (norms.q, norms.k), strict=False):
            add_norm(self.launcher, part, None, norm, part)
        return qkv

    def place_latent(self, heads: torch.Tensor, query: torch.Tensor, key: torch.Tensor, norm: Norm) -> None:
        """In one kernel."""
        assert type(norm) is RmsNorm, "latent vectors have no other norm"
        place_latent(self.launcher, heads, query, key, norm.weight.data, norm.eps)

    def select_rows(
        self, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, Residual]:
        """Copies the rows of both into new tensors."""
        if self.experts is not None:
            self.experts.skips_padding = False
        if self._lora is not None and self._lora.is_active:
            self._lora.select(rows)
        self._selected_rows = rows
        return _copy_rows(attn_out, rows), Residual(_copy_rows(residual, rows))

    def logits(
        self, residual: Residual, norm: Norm | None, lm_head: Linear, hidden_out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Like `norm_linear`, into a new tensor. With `hidden_out` the norm has a kernel of its own."""
        hidden = residual.hidden
        out = torch.empty(len(hidden), lm_head.out_features, dtype=hidden.dtype, device=hidden.device)
        if hidden_out is None:
            return self.norm_linear(residual, norm, lm_head, out)[1]
        if norm is None:
            hidden_out.copy_(self.settle(residual))
        else:
            self._normalize(residual, norm, hidden_out)
        return self.norm_linear(Residual(hidden_out), None, lm_head, out)[1]

    def settle(self, residual: Residual) -> torch.Tensor:
        """Adds the delta in a kernel of its own, if there is one."""
        hidden, delta, norm, multiplier, _ = residual
        if delta is None:
            return hidden
        if norm is None and multiplier == 1.0:
            return hidden.add_(delta)
        add_norm(self.launcher, hidden, delta, None, None, delta_norm=norm, multiplier=multiplier)
        return hidden

    def _split_norm(self, linear: Linear, hidden: torch.Tensor) -> SplitNorm | None:
        """The norm after this product, if the two products around it compute it."""
        norm, after = self._following.get(id(linear), (None, linear))
        if norm is None or not self.products.splits_norm(linear, norm, after, len(hidden)):
            return None
        return SplitNorm(norm.weight.data, norm.eps, self._hidden[: len(hidden)], self._squares)

    def _multiply(
        self,
        linear: Linear,
        x: MlpInput,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
        norm_after: SplitNorm | None = None,
    ) -> None:
        """The product, by the kernel of the layer's choice. What prepares x activates it, or a kernel before."""
        kernel = self.products.kernel(linear, len(out))
        if not isinstance(x, Unactivated):
            self.products.multiply(kernel, linear, x, out, residual=residual, norm_after=norm_after)
        elif self.products.fuses_activation(kernel, linear, len(out)):
            self.products.multiply(kernel, linear, x.rows, out, activation_before=x.activation)
        else:
            activated = x.rows[:, : linear.in_features]
            activate(self.launcher, x.rows, activated, x.activation)
            self.products.multiply(kernel, linear, activated, out, residual=residual, norm_after=norm_after)

    def _norm_multiply(
        self,
        kernel: LinearKernel,
        residual: Residual,
        norm: Norm | None,
        linear: Linear,
        out: torch.Tensor,
        activation: MlpActivation | None = None,
    ) -> Residual:
        """Norm and product, in one kernel where it can be. Nothing is left to be added to the residual."""
        hidden, delta = residual.hidden, residual.delta
        if norm is None:
            self.products.multiply(kernel, linear, self.settle(residual), out, activation=activation)
            return Residual(hidden)
        if residual.split_norm is not None:
            split = residual.split_norm
            self.products.multiply(kernel, linear, split.rows, out, norm=split, activation=activation)
            return Residual(hidden)
        is_plain = residual.delta_norm is None and residual.delta_multiplier == 1.0
        if is_plain and self.products.fuses_norm(kernel, linear, norm, len(hidden), has_delta=delta is not None):
            self.products.multiply(kernel, linear, hidden, out, norm=norm, delta=delta, activation=activation)
            return Residual(hidden)
        normed = self._hidden[: len(hidden)]  # may be `delta`
        self._normalize(residual, norm, normed)
        self.products.multiply(kernel, linear, normed, out, activation=activation)
        return Residual(hidden)

    def _normalize(self, residual: Residual, norm: Norm, out: torch.Tensor) -> None:
        """Adds the delta to the residual in place, and writes the normalised sum to `out`."""
        hidden, delta, delta_norm, multiplier, _ = residual
        add_norm(self.launcher, hidden, delta, norm, out, delta_norm=delta_norm, multiplier=multiplier)


def _copy_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of `x` in a new tensor. torch takes 8 µs to select 16, 1.5 to index them; for one row 1.8 and 2.7 µs."""
    return x.index_select(0, rows) if len(rows) == 1 else x[rows]
