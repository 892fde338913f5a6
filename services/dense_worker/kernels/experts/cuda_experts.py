"""`CudaExperts`: mixtures of experts on CUDA, by kernels that choose and multiply without waiting for the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from services.common.families.shape import ExpertOptions
from services.common.model_config import ModelConfig
from services.dense_worker.kernels.experts.routed_experts import ExpertLinear, RoutedExperts
from services.dense_worker.kernels.experts.router import GroupedRouter, Router, ScaledRouter, SparseMixer
from services.dense_worker.kernels.experts.triton_few import few_down, few_gate_up, few_router, few_shared_bytes
from services.dense_worker.kernels.experts.triton_grouped import choose_block_rows, grouped_linear, sum_pairs
from services.dense_worker.kernels.experts.triton_grouped_quantized import MAX_BLOCK_ROWS as MAX_QUANTIZED_BLOCK_ROWS
from services.dense_worker.kernels.experts.triton_grouped_quantized import grouped_quantized
from services.dense_worker.kernels.experts.triton_router import (
    PairBlocks,
    Routing,
    choose_experts,
    router_logits,
    router_tiles,
)
from services.dense_worker.kernels.linear.linear import TILE_BYTES, PlainWeight
from services.dense_worker.kernels.linear.quantized.operands import PreparedInput
from services.dense_worker.kernels.linear.quantized.quantized_gemv import OPERANDS
from services.dense_worker.kernels.linear.quantized.triton_prepare import prepare_input
from services.dense_worker.kernels.norm.norm import Norm, RmsNorm
from services.dense_worker.kernels.norm.triton_norm import add_norm
from services.dense_worker.kernels.triton_launch import KernelLauncher
from services.dense_worker.sampling.upload import upload

# Of all steps, if their tiles may not differ: what a step of few pairs has time for while it loads weights, and half of
# what long prompts have otherwise.
_SAME_BLOCK_ROWS = 64
_FEW_SHARE = 4  # pairs are few if they are at most this part of the experts: one pair in eight shares its expert


class CudaExperts:
    """The experts of steps of up to `max_num_tokens` tokens, on one stream. Workspaces keep their addresses."""

    def __init__(
        self,
        launcher: KernelLauncher,
        config: ModelConfig,
        options: ExpertOptions,
        max_num_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_deterministic: bool = False,
    ) -> None:
        """`is_deterministic`: kernels and tiles are the same for every number of tokens; weights must have 16 bits."""
        self._is_deterministic = is_deterministic
        self._launcher, self._options, self._max_num_tokens = launcher, options, max_num_tokens
        num_experts, num_per_token = options.num_experts, options.num_per_token
        max_num_pairs = max_num_tokens * num_per_token
        # Float32 takes twice as much: long rows of it have no kernels for few pairs.
        self._few_bytes = max(TILE_BYTES, few_shared_bytes(config.hidden_size, dtype))

        def workspace(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(rows, width, dtype=dtype, device=device)

        # Blocks of fewer rows are at most as many as the experts, besides one that is not full for each expert.
        max_num_blocks = num_experts + max(num_experts, max_num_pairs // MAX_QUANTIZED_BLOCK_ROWS)
        self._blocks = PairBlocks(num_experts, max_num_tokens, max_num_blocks, device)
        self._logits = workspace(max_num_tokens, num_experts, torch.float32)
        self._chosen = workspace(max_num_tokens, num_per_token, torch.int32)
        self._weights = workspace(max_num_tokens, num_per_token, torch.float32)
        self._activation = workspace(max_num_pairs, options.intermediate_size, dtype)
        self._products = workspace(max_num_pairs, config.hidden_size, dtype)
        # Programs of the router that have ended, for each of few tokens.
        self._num_done = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)
        self._num_valid = torch.full((1,), max_num_tokens, dtype=torch.int32, device=device)  # of the step's rows
        self.skips_padding = True  # whether the rows are those of the step, with its padding at the end

    def set_num_tokens(self, num_tokens: int) -> None:
        """Enqueues a copy of the step's number of tokens, without padding, to where captured graphs read it."""
        self._num_valid.copy_(upload(np.array([num_tokens], np.int32), self._num_valid.device), non_blocking=True)

    def variant_sizes(self) -> list[int]:
        """Numbers of tokens whose steps together run every variant of the kernels."""
        sizes: dict[tuple[bool, int, tuple[int, int]], int] = {}
        for num_tokens in range(1, self._max_num_tokens + 1):
            block_rows = self._block_rows(num_tokens * self._options.num_per_token)
            variant = self._is_few(num_tokens), block_rows, self._router_tiles(num_tokens)
            sizes.setdefault(variant, num_tokens)
        return list(sizes.values())

    def mix(
        self,
        x: torch.Tensor,  # [n, hidden], rows contiguous
        experts: RoutedExperts,
        shared: torch.Tensor | None,  # float32 [n, hidden]: added
        routed_by: torch.Tensor | None = None,  # [n, hidden], rows contiguous: what the router reads; None: x
    ) -> torch.Tensor:
        """The sum of the experts of each token and of `shared`, a new tensor [n, hidden] in x's dtype.

        Rows of padding become zero, where they are known: their experts would be read for nothing.
        """
        num_tokens, out = len(x), torch.empty_like(x)
        read = self._scaled(x if routed_by is None else routed_by, experts.router)
        if self.has_few(experts, num_tokens):
            self._activate_few(experts, read, None, None, x)
            self._sum_few(experts, shared, None, out)
            return out
        weights = self._weights[:num_tokens]
        num_pairs = num_tokens * self._options.num_per_token
        activation, products = self._activation[:num_pairs], self._products[:num_pairs]
        gate_up, down = experts.gate_up, experts.down
        block_rows = self._block_rows(num_pairs)
        if not _are_plain(experts):
            block_rows = min(block_rows, MAX_QUANTIZED_BLOCK_ROWS)
        self._route(read, experts, block_rows)
        gate = {"is_gated": True, "activation": experts.activation, "clamped": experts.clamped}
        self._multiply(gate_up, x, self._options.num_per_token, activation, block_rows, **gate)
        self._multiply(down, activation, 1, products, block_rows, is_gated=False)
        sum_pairs(self._launcher, products, weights, shared, self._valid, out)
        return out

    def has_few(self, experts: RoutedExperts, num_tokens: int) -> bool:
        """Whether so many tokens have kernels that fuse what comes before and after, see `activate_few`."""
        return _are_plain(experts) and self._is_few(num_tokens)

    def activate_few(self, x: torch.Tensor, norm: Norm | None, experts: RoutedExperts, normed: torch.Tensor) -> None:
        """Of norm(x), x [n, hidden]: chooses and activates the experts, for `add_few`. Only where `has_few`.

        normed: a workspace [n, hidden].
        """
        is_scaled = isinstance(experts.router, ScaledRouter)
        if norm is None or is_scaled:
            if norm is not None:
                add_norm(self._launcher, x, None, norm, normed)
                x = normed
            self._activate_few(experts, self._scaled(x, experts.router), None, None, x)
        else:
            self._activate_few(experts, x, norm, normed, normed)

    def add_few(self, experts: RoutedExperts, residual: torch.Tensor | None, out: torch.Tensor) -> None:
        """out = the sum of the experts that `activate_few` was given last, plus the residual [n, hidden]."""
        self._sum_few(experts, None, residual, out)

    def _activate_few(
        self,
        experts: RoutedExperts,
        routed_by: torch.Tensor,
        norm: Norm | None,  # of `routed_by`, before the router
        normed: torch.Tensor | None,  # written, if there is a norm
        x: torch.Tensor,
    ) -> None:
        router, gate_up, num_tokens = experts.router, experts.gate_up, len(x)
        routing, logit_bias, score_bias, factors = _choice_of(router)
        chosen, weights = self._chosen[:num_tokens], self._weights[:num_tokens]
        few_router(
            self._launcher, routed_by, norm, normed, router.weight.data, logit_bias, self._logits[:num_tokens],
            self._num_done[:num_tokens], score_bias, routing, self._valid, chosen, weights, experts.loads, factors,
            is_rounded=routing.grouped is None,
        )  # fmt: skip
        few_gate_up(
            self._launcher, x, chosen, gate_up.weight.matrix.data, gate_up.bias_data, self._valid,
            self._activation[: num_tokens * self._options.num_per_token], experts.activation, experts.clamped,
        )  # fmt: skip

    def _sum_few(
        self,
        experts: RoutedExperts,
        shared: torch.Tensor | None,
        residual: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        down, num_tokens = experts.down, len(out)
        activation = self._activation[: num_tokens * self._options.num_per_token]
        few_down(
            self._launcher, activation, self._chosen[:num_tokens], self._weights[:num_tokens], down.weight.matrix.data,
            down.bias_data, shared, residual, self._valid, out,
        )  # fmt: skip

    @property
    def _valid(self) -> torch.Tensor | None:
        return self._num_valid if self.skips_padding else None

    def _multiply(
        self,
        linear: ExpertLinear,
        x: torch.Tensor,
        pairs_per_row: int,
        out: torch.Tensor,
        block_rows: int,
        **gate: Any,
    ) -> None:
        """The products of all sorted pairs, see `grouped_linear`."""
        launcher, blocks, bias = self._launcher, self._blocks, linear.bias_data
        if isinstance(linear.weight, PlainWeight):
            matrix = linear.weight.matrix.data
            grouped_linear(launcher, x, pairs_per_row, matrix, bias, out, blocks, block_rows, **gate)
            return
        operands = OPERANDS[type(linear.weight)]
        form = operands.input_form(linear.weight, x.dtype)
        prepared = PreparedInput(x[None], None) if form.is_any else prepare_input(launcher, x, form)
        codes = operands.matrix(linear.weight)
        grouped_quantized(launcher, prepared, pairs_per_row, codes, bias, out, blocks, block_rows, **gate)

    def _scaled(self, x: torch.Tensor, router: Router) -> torch.Tensor:
        """What the router multiplies: x itself, or what `ScaledRouter` makes of it, a new tensor."""
        if not isinstance(router, ScaledRouter):
            return x
        scaled = torch.empty_like(x)
        add_norm(self._launcher, x, None, RmsNorm(router.scale, router.norm.eps), scaled)
        return scaled.mul_(x.shape[1] ** -0.5)

    def _route(self, x: torch.Tensor, experts: RoutedExperts, block_rows: int) -> None:
        router, num_tokens = experts.router, len(x)
        routing, logit_bias, score_bias, factors = _choice_of(router)
        logits, tiles = self._logits[:num_tokens], self._router_tiles(num_tokens)
        is_rounded = routing.grouped is None
        router_logits(self._launcher, x, router.weight.data, logit_bias, logits, tiles, is_rounded=is_rounded)
        choose_experts(
            self._launcher, logits, score_bias, routing, self._valid, self._chosen[:num_tokens],
            self._weights[:num_tokens], experts.loads, self._blocks, block_rows, factors,
        )  # fmt: skip

    def _block_rows(self, num_pairs: int) -> int:
        return _SAME_BLOCK_ROWS if self._is_deterministic else choose_block_rows(num_pairs, self._options.num_experts)

    def _router_tiles(self, num_rows: int) -> tuple[int, int]:
        return router_tiles(1 if self._is_deterministic else num_rows)

    def _is_few(self, num_tokens: int) -> bool:
        """Whether each pair gets programs of its own: as long as few pairs share an expert."""
        if self._is_deterministic:
            return False
        num_pairs = num_tokens * self._options.num_per_token
        has_room = self._launcher.shared_memory_bytes >= self._few_bytes
        return has_room and (num_tokens == 1 or num_pairs * _FEW_SHARE <= self._options.num_experts)


def _are_plain(experts: RoutedExperts) -> bool:
    return isinstance(experts.gate_up.weight, PlainWeight) and isinstance(experts.down.weight, PlainWeight)


def _choice_of(router: Router) -> tuple[Routing, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """How a router chooses, what it adds to logits and to scores, and the factors of its weights."""
    bias = None if router.bias is None else router.bias.data
    grouped, logit_bias, score_bias = None, bias, None
    if isinstance(router, GroupedRouter):
        grouped, logit_bias, score_bias = router.routing, None, bias
    jitter = router.jitter if isinstance(router, SparseMixer) else None
    routing = Routing(router.num_per_token, router.renormalizes, grouped, jitter)
    factors = router.expert_scale.data if isinstance(router, ScaledRouter) else None
    return routing, logit_bias, score_bias, factors
