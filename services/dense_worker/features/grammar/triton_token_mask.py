"""Applies masks of allowed tokens to logits on a GPU, in one pass.

Reference: `features/grammar/grammar_mask.py:apply_masks`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from services.common.compile_kernels import launch

_NUM_WORDS = 128  # of a mask, for one program


def compile_kernels(vocab_size: int, device: torch.device, dtypes: Iterable[torch.dtype]) -> None:
    """Warms up the kernel for logits of this number and these types."""
    rows, masks = torch.zeros(1, dtype=torch.int32), torch.zeros(1, -(-vocab_size // 32), dtype=torch.int32)
    for dtype in dtypes:
        logits = torch.zeros(1, vocab_size, dtype=dtype, device=device)
        apply_masks(logits, rows.pin_memory(), masks.pin_memory(), 0.5, only_compiles=True)


def apply_masks(
    logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor, floor: float, *, only_compiles: bool = False
) -> None:
    """Sets logits without a bit to -inf, and others below `floor` to `floor`; in place. Does not wait for the device.

    logits: [r, vocab_size], of any float type, contiguous; rows: integers [n], indices into logits; masks: int32 [n, at
    least vocab_size / 32], contiguous: the bit of token t is bit t % 32 of word t / 32. Rows and masks may be in pinned
    memory.
    """
    num_rows, num_words = masks.shape
    vocab_size = logits.shape[1]
    grid = (triton.cdiv(vocab_size, 32 * _NUM_WORDS), num_rows)
    operands = logits, rows, masks, floor, vocab_size, num_words
    launch(_mask_kernel, grid, *operands, only_compiles=only_compiles, NUM_WORDS=_NUM_WORDS, num_warps=8)


@triton.jit(do_not_specialize=["num_words"], do_not_specialize_on_alignment=["rows"])
def _mask_kernel(logits, rows, masks, floor, vocab_size, num_words, NUM_WORDS: tl.constexpr):
    part, index = tl.program_id(0), tl.program_id(1).to(tl.int64)
    word = part * NUM_WORDS + tl.arange(0, NUM_WORDS)
    bits = tl.load(masks + index * num_words + word, mask=word < num_words, other=0)  # each word once, over PCIe
    row = tl.load(rows + index).to(tl.int64)
    bit = tl.arange(0, 32)[None, :]
    token = word[:, None] * 32 + bit
    is_token = token < vocab_size
    is_allowed = ((bits[:, None] >> bit) & 1) != 0
    at = logits + row * vocab_size + token
    logit = tl.load(at, mask=is_token & is_allowed, other=-float("inf")).to(tl.float32)
    raised = tl.where(logit < floor, floor, logit)
    tl.store(at, tl.where(is_allowed, raised, -float("inf")), mask=is_token)
