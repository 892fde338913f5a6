"""Copies blocks of all layers from or to rows, and sums them up in the same pass, as a Triton kernel.

Copies of a tier run beside the steps, so they should read everything once and leave the GPU to the steps soon.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WORDS_PER_PROGRAM = 2048


def copy_blocks(
    blocks: torch.Tensor,  # int64 [num_layers, num_blocks, block_words of one layer]
    block_ids: torch.Tensor,  # int64 [num_copied]
    rows: torch.Tensor,  # int64 [num_copied, num_layers, block_words], which may lie apart
    weights: torch.Tensor,  # int64 [num_layers * block_words]
    checksums: torch.Tensor,  # int64 [num_copied]
    *,
    to_rows: bool,
) -> None:
    """Copies the blocks to `rows`, or `rows` to the blocks, which must then be different ones.

    Adds to `checksums` the sum of each row's words times `weights`, modulo 2^64.
    """
    num_layers, _, num_words = blocks.shape
    grid = (triton.cdiv(num_words, _WORDS_PER_PROGRAM), num_layers, len(block_ids))
    _copy_kernel[grid](
        blocks,
        block_ids,
        rows,
        weights,
        checksums,
        num_words,
        blocks.stride(0),
        rows.stride(0),
        TO_ROWS=to_rows,
        WORDS_PER_PROGRAM=_WORDS_PER_PROGRAM,
    )


@triton.jit
def _copy_kernel(
    blocks,
    block_ids,
    rows,
    weights,
    checksums,
    num_words,
    layer_stride,
    row_stride,
    TO_ROWS: tl.constexpr,
    WORDS_PER_PROGRAM: tl.constexpr,
):
    layer, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    words = tl.program_id(0) * WORDS_PER_PROGRAM + tl.arange(0, WORDS_PER_PROGRAM)
    is_word = words < num_words
    place = layer * num_words + words
    in_block = blocks + layer * layer_stride + tl.load(block_ids + row) * num_words + words
    in_row = rows + row * row_stride + place
    if TO_ROWS:
        content = tl.load(in_block, mask=is_word, other=0)
        tl.store(in_row, content, mask=is_word)
    else:
        content = tl.load(in_row, mask=is_word, other=0)
        tl.store(in_block, content, mask=is_word)
    weight = tl.load(weights + place, mask=is_word, other=0)
    tl.atomic_add(checksums + row, tl.sum(content * weight, axis=0))  # sums of integers do not depend on their order
