"""Draws tokens by the Gumbel-max trick on a GPU: random bits, noise and argmax of a row in one pass.

Reference: `sampling/gumbel.py`, which has the same random bits and, except that noise is rounded to float32 here, the
same scores. The token of a row does not depend on other rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np
import torch
import triton
import triton.language as tl

from services.common.compile_kernels import launch
from services.dense_worker.sampling.philox import TOKENS_PER_BLOCK
from services.dense_worker.sampling.upload import HostStages, upload

_BLOCKS_PER_PROGRAM = 256  # blocks of the random generator
_STEP = tl.constexpr(2.0**-32)  # distance between two uniform numbers


def compile_kernels(vocab_size: int, device: torch.device, dtypes: Iterable[torch.dtype]) -> None:
    """Warms up the kernels for logits of this number and these types: the first draw does not wait for the compiler."""
    ones = np.ones(1, dtype=np.uint64)
    for dtype in dtypes:
        logits = torch.zeros(1, vocab_size, dtype=dtype, device=device)
        draw(logits, ones.astype(np.float32), ones, ones, only_compiles=True)


def draw(
    logits: torch.Tensor,
    temperatures: np.ndarray,
    seeds: np.ndarray,
    positions: np.ndarray | torch.Tensor,
    *,
    stages: HostStages | None = None,
    only_compiles: bool = False,
) -> torch.Tensor:
    """Token ids, int64 [r], on the device of the logits. The lowest of equal scores wins. Does not wait for the device.

    logits: [r, vocab_size], of any float type, contiguous; rows of NaN give an arbitrary token
    temperatures: np.float32 [r], above 0
    seeds, positions: np.uint64 [r]; positions may also be an int64 tensor on the device of the logits
    stages: for what the host knows, if it has the positions; None: that is copied to the device
    """
    num_rows, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, _BLOCKS_PER_PROGRAM * TOKENS_PER_BLOCK)
    inverse_temperatures = 1.0 / temperatures.astype(np.float64)
    has_positions = isinstance(positions, np.ndarray)
    on_host = (inverse_temperatures.view(np.uint64), seeds, positions if has_positions else seeds)
    if stages is not None and has_positions:
        keys = stages.take(num_rows, 3, dtype=torch.int64)
        np.stack(on_host, axis=1, out=keys.numpy().view(np.uint64))
    else:
        keys = upload(np.stack(on_host, axis=1).view(np.int64), logits.device)
    if not has_positions:
        keys[:, 2] = positions
    scores = torch.empty(num_rows, num_parts, dtype=torch.float64, device=logits.device)
    candidates = torch.empty(num_rows, num_parts, dtype=torch.int64, device=logits.device)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    run = partial(launch, only_compiles=only_compiles)
    score = scores, candidates, logits, keys, vocab_size, num_parts
    run(_score_kernel, (num_parts, num_rows), *score, NUM_BLOCKS=_BLOCKS_PER_PROGRAM, num_warps=4)
    if stages is not None and has_positions:
        stages.note_read()
    pick = token_ids, scores, candidates, num_parts
    run(_pick_kernel, (num_rows,), *pick, NUM_PARTS=triton.next_power_of_2(num_parts), num_warps=1)
    return token_ids


@triton.jit
def token_block(seed, position, block):
    """The four 64-bit words of Philox4x64-10 that hold the bits of tokens 8 * block to 8 * block + 7."""
    counter = block.to(tl.uint64) + 1
    zero = counter * 0
    return tl.philox(seed, counter, zero + position.to(tl.uint64), zero, zero)


@triton.jit
def gumbel_noise(bits):
    """-log(-log(u)), float32. (0, 1) has 2**32 equal parts; u is the middle of part `bits` (uint32)."""
    rest = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * _STEP  # 1 - u; the smaller one of u and 1 - u is precise
    is_low = bits < 0x80000000
    u = tl.where(is_low, (bits.to(tl.float32) + 0.5) * _STEP, 1.0 - rest)
    log_u = tl.log(u)
    # The quotient corrects the rounding of 1 - rest (Kahan's formula for log1p).
    exponential = tl.where(u == 1.0, rest, rest * (log_u / (u - 1.0)))
    return -tl.log(tl.where(is_low, -log_u, exponential))


@triton.jit
def _score_kernel(scores, candidates, logits, keys, vocab_size, num_parts, NUM_BLOCKS: tl.constexpr):
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    inverse_temperature = tl.load(keys + row * 3).to(tl.float64, bitcast=True)
    seed, position = tl.load(keys + row * 3 + 1), tl.load(keys + row * 3 + 2)
    blocks = part * NUM_BLOCKS + tl.arange(0, NUM_BLOCKS)
    word_0, word_1, word_2, word_3 = token_block(seed, position, blocks)
    best = tl.full([NUM_BLOCKS], -float("inf"), tl.float64)
    best_token = blocks * 8
    for i in tl.static_range(8):
        if i // 2 == 0:
            word = word_0
        elif i // 2 == 1:
            word = word_1
        elif i // 2 == 2:
            word = word_2
        else:
            word = word_3
        bits = (word >> (32 * (i % 2))).to(tl.uint32)
        token = blocks * 8 + i
        logit = tl.load(logits + row * vocab_size + token, mask=token < vocab_size, other=-float("inf"))
        score = logit.to(tl.float64) * inverse_temperature + gumbel_noise(bits).to(tl.float64)
        is_better = score > best  # False for NaN
        best = tl.where(is_better, score, best)
        best_token = tl.where(is_better, token, best_token)
    top = tl.max(best)
    first = tl.min(tl.where(best == top, best_token, 0x7FFFFFFF))
    tl.store(scores + row * num_parts + part, top)
    tl.store(candidates + row * num_parts + part, first.to(tl.int64))


@triton.jit
def _pick_kernel(token_ids, scores, candidates, num_parts, NUM_PARTS: tl.constexpr):
    row, parts = tl.program_id(0).to(tl.int64), tl.arange(0, NUM_PARTS)
    is_part = parts < num_parts
    score = tl.load(scores + row * num_parts + parts, mask=is_part, other=-float("inf"))
    candidate = tl.load(candidates + row * num_parts + parts, mask=is_part, other=0x7FFFFFFF)
    tl.store(token_ids + row, tl.min(tl.where(score == tl.max(score), candidate, 0x7FFFFFFF)))
