"""The router on CUDA: logits of all experts, then for each token the experts that it chooses, with their weights.

Reference: `model.experts.router`. The kernel that chooses also sorts: it gives each pair of a token and an expert a
slot among those of its expert, and the program that ends last lists the blocks of rows for the grouped products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from services.common.families.shape import GroupedRouting
from services.dense_worker.kernels.triton_launch import KernelLauncher, begin

_FEW_ROWS = 64
_NUM_STAGES = 3  # of the loop that computes logits
_MIN_COLUMNS, _MAX_COLUMNS = 64, 512
_LEAST_KEY = tl.constexpr(-3.0e38)  # instead of NaN and what is below: above the key of an expert that is taken


class PairBlocks:
    """Pairs by expert, in device memory, for the products of one layer. Pair p is choice p % k of token p // k.

    Its size is fixed: an expert has a slot for each token of the largest step, a step as many blocks as it can need.
    """

    def __init__(self, num_experts: int, max_num_tokens: int, max_num_blocks: int, device: torch.device) -> None:
        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.slots = integers(num_experts, max_num_tokens)  # the pairs of each expert
        self.counts = integers(num_experts)  # the number of these pairs
        self.num_blocks = integers(1)
        self.experts, self.first_slots = integers(max_num_blocks), integers(max_num_blocks)  # of each block
        self.unsorted_counts, self.num_done = integers(num_experts), integers(1)  # zero between launches


@dataclass(frozen=True, slots=True)
class Routing:
    """How scores become choices."""

    num_per_token: int
    renormalizes: bool
    grouped: GroupedRouting | None  # None: a softmax of all experts
    mixer_jitter: float | None = None  # of a `SparseMixer`

    @property
    def multiplier(self) -> float:
        """Of the weights."""
        return 1.0 if self.grouped is None else self.grouped.multiplier

    def constants(self, num_experts: int) -> dict[str, Any]:
        """What kernels that choose are compiled for."""
        grouped = self.grouped
        num_groups = 1 if grouped is None else grouped.num_groups
        return {
            "NUM_EXPERTS": num_experts,
            "NUM_GROUPS": num_groups,
            "NUM_GROUPS_PER_TOKEN": 1 if grouped is None else grouped.num_groups_per_token,
            "NUM_PER_TOKEN": self.num_per_token,
            "IS_SIGMOID": grouped is not None and grouped.is_sigmoid,
            "HAS_MULTIPLIER": grouped is not None,
            "IS_MIXER": self.mixer_jitter is not None,
            "RENORMALIZES": self.renormalizes,
            "BLOCK_GROUPS": triton.next_power_of_2(num_groups),
            "BLOCK_MEMBERS": triton.next_power_of_2(num_experts // num_groups),
            "BLOCK_CHOICES": triton.next_power_of_2(self.num_per_token),
        }


def router_tiles(num_rows: int) -> tuple[int, int]:
    """The rows and the experts of a program that computes logits: few, for what takes time are its loads, not sums."""
    return (16, 16) if num_rows <= _FEW_ROWS else (32, 64)


def _router_columns(tiles: tuple[int, int], element_size: int, shared_memory_bytes: int) -> int:
    """The columns of a step of the loop, of which `_NUM_STAGES` must fit: many, for few steps."""
    columns = _MAX_COLUMNS
    while columns > _MIN_COLUMNS and _NUM_STAGES * sum(tiles) * columns * element_size > shared_memory_bytes:
        columns //= 2
    return columns


def router_logits(
    launcher: KernelLauncher,
    x: torch.Tensor,  # [n, hidden], rows contiguous
    weight: torch.Tensor,  # [num_experts, hidden], x's dtype
    bias: torch.Tensor | None,  # [num_experts]
    out: torch.Tensor,  # float32 [n, num_experts]
    tiles: tuple[int, int],  # of `router_tiles`
    is_rounded: bool,  # to x's dtype
) -> None:
    """Writes x W^T + bias to `out`."""
    num_rows, in_features = x.shape
    num_experts = len(weight)
    block_rows, block_out = tiles
    launcher(
        _logits_kernel,
        (triton.cdiv(num_experts, block_out), triton.cdiv(num_rows, block_rows)),
        out,
        x,
        weight,
        bias,
        num_rows,
        num_experts,
        in_features,
        x.stride(0),
        IS_ROUNDED=is_rounded,
        BLOCK_ROWS=block_rows,
        BLOCK_OUT=block_out,
        BLOCK_IN=_router_columns(tiles, x.element_size(), launcher.shared_memory_bytes),
        NUM_STAGES=_NUM_STAGES,
        num_warps=2 if block_out == 16 else 4,
    )


def choose_experts(
    launcher: KernelLauncher,
    logits: torch.Tensor,  # float32 [n, num_experts]
    bias: torch.Tensor | None,  # float32 [num_experts]: added to the scores for the choice only
    routing: Routing,
    num_valid: torch.Tensor | None,  # int32 [1]: rows from here on are padding and choose nothing; None: no padding
    experts: torch.Tensor,  # int32 [n, num_per_token]: the choices
    weights: torch.Tensor,  # float32 [n, num_per_token]
    loads: torch.Tensor | None,  # int64 [num_experts]: increased by the number of tokens of each expert
    blocks: PairBlocks,  # written
    block_rows: int,  # rows of a block
    factors: torch.Tensor | None = None,  # [num_experts]: each expert's weight is multiplied by its factor in the end
) -> None:
    """Chooses the experts of each token."""
    num_rows, num_experts = logits.shape
    launcher(
        _choose_kernel,
        (num_rows,),
        logits,
        bias,
        factors,
        num_valid,
        experts,
        weights,
        loads,
        blocks.slots,
        blocks.counts,
        blocks.num_blocks,
        blocks.experts,
        blocks.first_slots,
        blocks.unsorted_counts,
        blocks.num_done,
        blocks.slots.stride(0),
        routing.multiplier,
        routing.mixer_jitter or 0.0,
        **routing.constants(num_experts),
        BLOCK_ROWS=block_rows,
        BLOCK_EXPERTS=triton.next_power_of_2(num_experts),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _logits_kernel(
    out,
    x,
    weight,
    bias,
    num_rows,
    num_experts,
    in_features,
    x_stride,
    IS_ROUNDED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program computes the logits of BLOCK_OUT experts for BLOCK_ROWS rows."""
    begin(PDL)
    experts = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_expert, is_row = experts < num_experts, rows < num_rows
    w_rows = weight + tl.where(is_expert, experts, 0)[:, None] * in_features
    x_rows = x + rows.to(tl.int64)[:, None] * x_stride
    sums = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    for first_column in tl.range(0, in_features, BLOCK_IN, num_stages=NUM_STAGES):
        columns = first_column + tl.arange(0, BLOCK_IN)
        is_column = columns < in_features
        w = tl.load(w_rows + columns[None, :], mask=is_column[None, :], other=0.0)
        x_tile = tl.load(x_rows + columns[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0)
        sums = tl.dot(w, tl.trans(x_tile), sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + experts, mask=is_expert, other=0.0).to(tl.float32)[:, None]
    if IS_ROUNDED:
        sums = sums.to(x.dtype.element_ty).to(tl.float32)
    target = out + rows.to(tl.int64)[None, :] * num_experts + experts[:, None]
    tl.store(target, sums, mask=is_expert[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["capacity"])
def _choose_kernel(
    logits,
    bias,
    factors,
    num_valid,
    experts,
    weights,
    loads,
    slots,
    counts,
    num_blocks,
    block_experts,
    block_first_slots,
    unsorted_counts,
    num_done,
    capacity,
    multiplier,
    mixer_jitter,
    NUM_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_GROUPS_PER_TOKEN: tl.constexpr,
    NUM_PER_TOKEN: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    HAS_MULTIPLIER: tl.constexpr,
    IS_MIXER: tl.constexpr,
    RENORMALIZES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_MEMBERS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_CHOICES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program, a warp, chooses for one token."""
    begin(PDL)
    row = tl.program_id(0)
    is_valid = True
    if num_valid is not None:
        is_valid = row < tl.load(num_valid)
    if is_valid:
        chosen, weight = choose_for_token(
            logits, bias, factors, row, multiplier, mixer_jitter, NUM_EXPERTS, NUM_GROUPS, NUM_GROUPS_PER_TOKEN,
            NUM_PER_TOKEN, IS_SIGMOID, HAS_MULTIPLIER, IS_MIXER, RENORMALIZES, False, BLOCK_GROUPS, BLOCK_MEMBERS,
            BLOCK_CHOICES,
        )  # fmt: skip
        choices = tl.arange(0, BLOCK_CHOICES)
        is_choice = choices < NUM_PER_TOKEN
        pairs = row * NUM_PER_TOKEN + choices
        tl.store(experts + pairs, chosen, mask=is_choice)
        tl.store(weights + pairs, weight, mask=is_choice)
        rank = tl.atomic_add(unsorted_counts + chosen, 1, mask=is_choice)
        tl.store(slots + chosen.to(tl.int64) * capacity + rank, pairs, mask=is_choice)
    tl.debug_barrier()  # all threads count their pairs before one of them counts the program
    if tl.atomic_add(num_done, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(num_done, 0)
        ids = tl.arange(0, BLOCK_EXPERTS)
        exists = ids < NUM_EXPERTS
        count = tl.atomic_xchg(unsorted_counts + ids, tl.zeros([BLOCK_EXPERTS], tl.int32), mask=exists)
        count = tl.where(exists, count, 0)
        tl.store(counts + ids, count, mask=exists)
        its_blocks = tl.cdiv(count, BLOCK_ROWS)
        start = tl.cumsum(its_blocks, 0) - its_blocks
        tl.store(num_blocks, tl.sum(its_blocks, 0))
        for i in range(tl.max(its_blocks, 0)):
            tl.store(block_experts + start + i, ids, mask=i < its_blocks)
            tl.store(block_first_slots + start + i, tl.zeros_like(ids) + i * BLOCK_ROWS, mask=i < its_blocks)
        if loads is not None:
            total = tl.load(loads + ids, mask=exists, other=0) + count
            tl.store(loads + ids, total, mask=exists)


@triton.jit
def choose_for_token(
    logits,
    bias,
    factors,
    row,
    multiplier,
    mixer_jitter,
    NUM_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_GROUPS_PER_TOKEN: tl.constexpr,
    NUM_PER_TOKEN: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    HAS_MULTIPLIER: tl.constexpr,
    IS_MIXER: tl.constexpr,
    RENORMALIZES: tl.constexpr,
    IS_AT_ONCE: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_MEMBERS: tl.constexpr,
    BLOCK_CHOICES: tl.constexpr,
):
    """The experts of a token and their weights, [BLOCK_CHOICES].

    IS_AT_ONCE: by each one's place among all, not one after the other, which takes several warps longer.
    """
    # [groups, members of a group]: padding makes both powers of two.
    groups, members = tl.arange(0, BLOCK_GROUPS)[:, None], tl.arange(0, BLOCK_MEMBERS)[None, :]
    each_id = groups * (NUM_EXPERTS // NUM_GROUPS) + members
    is_expert = (groups < NUM_GROUPS) & (members < NUM_EXPERTS // NUM_GROUPS)
    at = logits + row.to(tl.int64) * NUM_EXPERTS + each_id
    # Programs of the same kernel may have written them: not from the first-level cache.
    logit = tl.load(at, mask=is_expert, other=float("-inf"), cache_modifier=".cg")
    if IS_MIXER:
        score = logit
    elif IS_SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        score = tl.exp(logit - tl.max(tl.max(logit, 1), 0))
        score = score / tl.sum(tl.sum(score, 1), 0)
    key = score
    if bias is not None:
        key += tl.load(bias + each_id, mask=is_expert, other=0.0)
    key = tl.where(key > _LEAST_KEY, key, _LEAST_KEY)  # also for NaN, so that a token's choices always differ
    key = tl.where(is_expert, key, float("-inf"))
    if NUM_GROUPS_PER_TOKEN < NUM_GROUPS:
        key = _keep_best_groups(key, IS_SIGMOID, NUM_GROUPS, NUM_GROUPS_PER_TOKEN, BLOCK_GROUPS, BLOCK_MEMBERS)
    key = tl.reshape(key, [BLOCK_GROUPS * BLOCK_MEMBERS])
    score = tl.reshape(score, [BLOCK_GROUPS * BLOCK_MEMBERS])
    places = tl.arange(0, BLOCK_GROUPS * BLOCK_MEMBERS)
    choices = tl.arange(0, BLOCK_CHOICES)
    chosen = tl.zeros([BLOCK_CHOICES], tl.int32)
    weight = tl.zeros([BLOCK_CHOICES], tl.float32)
    if IS_AT_ONCE and not IS_MIXER:
        is_before = key[:, None] > key[None, :]
        is_before |= (key[:, None] == key[None, :]) & (places[:, None] < places[None, :])
        its_place = tl.sum(is_before.to(tl.int32), 0)
        is_choice = (its_place[None, :] == choices[:, None]) & (choices < NUM_PER_TOKEN)[:, None]
        chosen = tl.sum(tl.where(is_choice, tl.reshape(each_id, [BLOCK_GROUPS * BLOCK_MEMBERS])[None, :], 0), 1)
        weight = tl.sum(tl.where(is_choice, score[None, :], 0.0), 1)
    else:
        for i in range(NUM_PER_TOKEN):
            place = tl.argmax(key, 0)
            its_score = tl.sum(tl.where(places == place, score, 0.0), 0)
            if IS_MIXER:  # the softmax of it among those that are left and near
                is_near = its_score - score <= 2 * mixer_jitter * tl.maximum(tl.abs(score), its_score)
                its_score = 1.0 / tl.sum(tl.where(is_near, tl.exp(key - its_score), 0.0), 0)
            expert = (place // BLOCK_MEMBERS) * (NUM_EXPERTS // NUM_GROUPS) + place % BLOCK_MEMBERS
            chosen = tl.where(choices == i, expert, chosen)
            weight = tl.where(choices == i, its_score, weight)
            key = tl.where(places == place, float("-inf"), key)
    if RENORMALIZES:
        weight = weight / (tl.sum(weight, 0) + (1e-20 if HAS_MULTIPLIER else 0.0))
    if HAS_MULTIPLIER:
        weight *= multiplier
    if factors is not None:
        weight *= tl.load(factors + chosen, mask=choices < NUM_PER_TOKEN, other=0.0).to(tl.float32)
    return chosen, weight


@triton.jit
def _keep_best_groups(
    key,  # [BLOCK_GROUPS, BLOCK_MEMBERS]
    ADDS_TWO: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_GROUPS_PER_TOKEN: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_MEMBERS: tl.constexpr,
):
    """Leaves the keys of the best groups; the others become -inf.

    These are the groups with the greatest keys or, if ADDS_TWO, with the greatest sums of their two greatest keys.
    """
    members = tl.arange(0, BLOCK_MEMBERS)[None, :]
    best = tl.max(key, 1)
    groups = tl.arange(0, BLOCK_GROUPS)
    if ADDS_TWO:
        others = tl.where(members == tl.argmax(key, 1)[:, None], float("-inf"), key)
        best = 0.5 * best + 0.5 * tl.max(others, 1)  # half of the sum, which cannot overflow to -inf
    group_key = tl.where(groups < NUM_GROUPS, best, float("-inf"))
    is_kept = tl.zeros([BLOCK_GROUPS], tl.int32)
    for _ in range(NUM_GROUPS_PER_TOKEN):
        group = tl.argmax(group_key, 0)
        is_kept = tl.where(groups == group, 1, is_kept)
        group_key = tl.where(groups == group, float("-inf"), group_key)
    return tl.where(is_kept[:, None] > 0, key, float("-inf"))
