"""Computes the kernels of mixtures of experts by torch on a CPU, for `fake_triton_kernels`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn import functional as F

from services.common.families.shape import Activation, ClampedSwiglu
from services.dense_worker.kernels.experts.router import GroupedRouter, SoftmaxRouter, SparseMixer
from services.dense_worker.kernels.linear.activation import ACTIVATIONS, clamped_swiglu
from services.dense_worker.kernels.linear.quantized.operands import PreparedInput, QuantizedMatrix
from services.dense_worker.kernels.norm.norm import Norm
from services.dense_worker.parameters import Parameter
from tests.support.dense.fake_quantized_kernels import dequantized

Tensor = torch.Tensor
Own = Callable[..., AbstractContextManager[None]]
BLOCK_ROWS, SAME_BLOCK_ROWS = 16, 64  # the second one of all steps, with `dense.deterministic`


class PairBlocks:
    """Replaces the real one: the choices of the last step, for the grouped products."""

    def __init__(self, num_experts: int, max_num_tokens: int, max_num_blocks: int, device: torch.device) -> None:
        self.choices = torch.empty(0)


class Routing:
    """Replaces the real one."""

    def __init__(self, num_per_token: int, renormalizes: bool, grouped: Any, mixer_jitter: float | None) -> None:
        self.options, self.grouped = (num_per_token, renormalizes, grouped), grouped
        self.mixer_jitter = mixer_jitter


def expert_kernels(own: Own) -> dict[str, dict[str, object]]:
    """The names that other modules import from each module of kernels."""
    kernels = _Kernels(own)
    router = {"router_logits": kernels.router_logits, "choose_experts": kernels.choose_experts}
    router |= {"router_tiles": lambda *_: (16, 16), "PairBlocks": PairBlocks, "Routing": Routing}
    grouped = {"grouped_linear": kernels.grouped_linear, "sum_pairs": kernels.sum_pairs, "MAX_BLOCK_ROWS": 128}
    grouped |= {"choose_block_rows": lambda *_: BLOCK_ROWS}
    few = {"few_router": kernels.few_router, "few_gate_up": kernels.few_gate_up, "few_down": kernels.few_down}
    few["few_shared_bytes"] = lambda *_: 0
    quantized = {"grouped_quantized": kernels.grouped_quantized, "MAX_BLOCK_ROWS": 64}
    return {
        "services.dense_worker.kernels.experts.triton_router": router,
        "services.dense_worker.kernels.experts.triton_grouped": grouped,
        "services.dense_worker.kernels.experts.triton_grouped_quantized": quantized,
        "services.dense_worker.kernels.experts.triton_few": few,
    }


class _Kernels:
    """The kernels' functions with the signatures of the real ones."""

    def __init__(self, own: Own) -> None:
        self._own = own

    def router_logits(
        self,
        launcher: object,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor,
        tiles: tuple[int, int],
        is_rounded: bool,
    ) -> None:
        with self._own("router_logits", out, rounded=is_rounded):
            out.copy_(F.linear(x, weight, bias) if is_rounded else F.linear(x.float(), weight.float()))

    def choose_experts(
        self,
        launcher: object,
        logits: Tensor,
        bias: Tensor | None,
        routing: Routing,
        num_valid: Tensor | None,
        experts: Tensor,
        weights: Tensor,
        loads: Tensor | None,
        blocks: PairBlocks,
        block_rows: int,
        factors: Tensor | None = None,
    ) -> None:
        with self._own("choose_experts", experts, sorted=blocks):
            _choose(logits, bias, routing, factors, experts, weights)
            num_rows = _num_valid(num_valid, len(logits))
            if loads is not None:
                loads += torch.bincount(experts[:num_rows].flatten(), minlength=len(loads))
            blocks.choices = experts.clone()

    def grouped_linear(
        self,
        launcher: object,
        x: Tensor,
        pairs_per_row: int,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor,
        blocks: PairBlocks,
        block_rows: int,
        *,
        is_gated: bool,
        activation: Activation = Activation.SILU,
        clamped: ClampedSwiglu | None = None,
    ) -> None:
        with self._own("grouped_linear", out, gated=is_gated):
            assert block_rows in (BLOCK_ROWS, SAME_BLOCK_ROWS)
            rows = x.repeat_interleave(pairs_per_row, dim=0)
            experts, gate = blocks.choices.flatten(), (is_gated, activation, clamped)
            out.copy_(_products(rows, experts, weight, bias, out.shape[1], *gate))

    def grouped_quantized(
        self,
        launcher: object,
        x: PreparedInput,
        pairs_per_row: int,
        matrix: QuantizedMatrix,
        bias: Tensor | None,
        out: Tensor,
        blocks: PairBlocks,
        block_rows: int,
        *,
        is_gated: bool,
        activation: Activation = Activation.SILU,
        clamped: ClampedSwiglu | None = None,
    ) -> None:
        with self._own("grouped_quantized", out, gated=is_gated):
            assert block_rows == BLOCK_ROWS and x.values.dtype in (torch.float16, torch.bfloat16)
            [values], width = x.values.float(), x.values.shape[2]
            if x.scale is not None:
                values = values * x.scale[0].repeat_interleave(matrix.group_size or width, dim=1)[:, :width]
            rows, experts = values.repeat_interleave(pairs_per_row, dim=0), blocks.choices.flatten()
            wide_bias, gate = None if bias is None else bias.float(), (is_gated, activation, clamped)
            out.copy_(_products(rows, experts, dequantized(matrix), wide_bias, out.shape[1], *gate))

    def sum_pairs(
        self,
        launcher: object,
        pairs: Tensor,
        weights: Tensor,
        shared: Tensor | None,
        num_valid: Tensor | None,
        out: Tensor,
    ) -> None:
        with self._own("sum_pairs", out, shared=shared):
            total = (pairs.float().view(len(out), -1, out.shape[1]) * weights[:, :, None]).sum(1)
            out.copy_(total if shared is None else total + shared)
            out[_num_valid(num_valid, len(out)) :] = 0

    def few_router(
        self,
        launcher: object,
        x: Tensor,
        norm: Norm | None,
        normed: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        logits: Tensor,
        num_done: Tensor,
        score_bias: Tensor | None,
        routing: Routing,
        num_valid: Tensor | None,
        experts: Tensor,
        weights: Tensor,
        loads: Tensor | None,
        factors: Tensor | None,
        *,
        is_rounded: bool,
    ) -> None:
        with self._own("few_router", experts, norm=norm, rounded=is_rounded):
            if norm is not None:
                assert normed is not None
                x = normed.copy_(norm.normalize(x))
            logits.copy_(F.linear(x, weight, bias) if is_rounded else F.linear(x.float(), weight.float()))
            _choose(logits, score_bias, routing, factors, experts, weights)
            if loads is not None:
                num_rows = _num_valid(num_valid, len(experts))
                loads += torch.bincount(experts[:num_rows].flatten(), minlength=len(loads))

    def few_gate_up(
        self,
        launcher: object,
        x: Tensor,
        experts: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        num_valid: Tensor | None,
        out: Tensor,
        activation: Activation,
        clamped: ClampedSwiglu | None,
    ) -> None:
        with self._own("few_gate_up", out):
            rows = x.repeat_interleave(experts.shape[1], dim=0)
            out.copy_(_products(rows, experts.flatten(), weight, bias, out.shape[1], True, activation, clamped))

    def few_down(
        self,
        launcher: object,
        activation: Tensor,
        experts: Tensor,
        weights: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        shared: Tensor | None,
        residual: Tensor | None,
        num_valid: Tensor | None,
        out: Tensor,
    ) -> None:
        with self._own("few_down", out, shared=shared, residual=residual):
            pairs = _products(activation, experts.flatten(), weight, bias, out.shape[1], is_gated=False)
            total = (pairs.float().view(len(out), -1, out.shape[1]) * weights[:, :, None]).sum(1)
            total = (total if shared is None else total + shared).to(out.dtype)
            total[_num_valid(num_valid, len(out)) :] = 0
            out.copy_(total if residual is None else residual + total)


def _choose(
    logits: Tensor, bias: Tensor | None, routing: Routing, factors: Tensor | None, experts: Tensor, weights: Tensor
) -> None:
    num_per_token, renormalizes, grouped = routing.options
    identity = Parameter("", torch.eye(logits.shape[1], device=logits.device))
    router: Any = SoftmaxRouter(identity, num_per_token, renormalizes)
    if grouped is not None:
        score_bias = None if bias is None else Parameter("", bias)
        router = GroupedRouter(identity, score_bias, num_per_token, renormalizes, grouped)
    if routing.mixer_jitter is not None:
        router = SparseMixer(identity, num_per_token, routing.mixer_jitter)
    chosen, its_weights = router.choose(logits)
    experts.copy_(chosen)
    weights.copy_(its_weights if factors is None else its_weights * factors[chosen])


def _num_valid(num_valid: Tensor | None, num_rows: int) -> int:
    return num_rows if num_valid is None else int(num_valid)


def _products(
    x: Tensor,
    experts: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int,
    is_gated: bool,
    activation: Activation = Activation.SILU,
    clamped: ClampedSwiglu | None = None,
) -> Tensor:
    """The product of each row with the matrix of its expert."""
    size = out_features * (1 + is_gated)
    matrices = weight.view(-1, size, x.shape[1])[experts.long()]
    y = torch.bmm(matrices, x[:, :, None])[:, :, 0]
    if bias is not None:
        y = y + bias.view(-1, size)[experts.long()]
    if not is_gated:
        return y
    gate, up = y.chunk(2, dim=1)
    return ACTIVATIONS[activation](gate) * up if clamped is None else clamped_swiglu(gate, up, clamped)
