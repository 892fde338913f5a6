"""Applies masks of allowed tokens to logits on a GPU, in one pass.

Reference: `sampling/grammar_mask.py:apply_masks`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK_SIZE = 4096  # tokens of one program


def apply_masks(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor, floor: float) -> None:
    """Sets logits without a bit to -inf, and others below `floor` to `floor`; in place. Does not wait for the device.

    logits: float32 [r, vocab_size], contiguous; rows: int64 [n], indices into logits; masks: int32 [n, at least
    vocab_size / 32], contiguous: the bit of token t is bit t % 32 of word t / 32
    """
    num_rows, num_words = masks.shape
    vocab_size = logits.shape[1]
    grid = (triton.cdiv(vocab_size, _BLOCK_SIZE), num_rows)
    _mask_kernel[grid](logits, rows, masks, floor, vocab_size, num_words, BLOCK_SIZE=_BLOCK_SIZE, num_warps=8)


@triton.jit
def _mask_kernel(logits, rows, masks, floor, vocab_size, num_words, BLOCK_SIZE: tl.constexpr):
    part, index = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.load(rows + index)
    token = part * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    is_token = token < vocab_size
    word = tl.load(masks + index * num_words + token // 32, mask=is_token, other=0)
    is_allowed = ((word >> (token % 32)) & 1) != 0
    at = logits + row * vocab_size + token
    logit = tl.load(at, mask=is_token & is_allowed, other=-float("inf"))
    raised = tl.where(logit < floor, floor, logit)
    tl.store(at, tl.where(is_allowed, raised, -float("inf")), mask=is_token)
