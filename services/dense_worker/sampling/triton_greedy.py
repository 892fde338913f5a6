"""Finds the most likely token of each row on a GPU. torch reads a row with one program, and a few long ones slowly."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
import triton
import triton.language as tl

from services.common.compile_kernels import launch

_PART_SIZE = 4096  # logits of a program
_BEYOND = tl.constexpr(0x7FFFFFFF)  # no token id


def compile_kernels(vocab_size: int, device: torch.device, dtypes: Iterable[torch.dtype]) -> None:
    """Warms up the kernels for logits of this number and these types."""
    for dtype in dtypes:
        find_greatest(torch.zeros(1, vocab_size, dtype=dtype, device=device), only_compiles=True)


def find_greatest(logits: torch.Tensor, *, only_compiles: bool = False) -> torch.Tensor:
    """The first token with the greatest logit, int64 [r], on the device of the logits. Does not wait for the device.

    logits: [r, vocab_size], of any float type, contiguous; rows of NaN give an arbitrary token
    """
    num_rows, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, _PART_SIZE)
    greatest = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits.device)
    candidates = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits.device)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    run = partial(launch, only_compiles=only_compiles)
    part = greatest, candidates, logits, vocab_size, num_parts
    run(_part_kernel, (num_parts, num_rows), *part, PART_SIZE=_PART_SIZE, num_warps=4)
    pick = token_ids, greatest, candidates, num_parts
    run(_pick_kernel, (num_rows,), *pick, NUM_PARTS=triton.next_power_of_2(num_parts), num_warps=1)
    return token_ids


@triton.jit
def _part_kernel(greatest, candidates, logits, vocab_size, num_parts, PART_SIZE: tl.constexpr):
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tokens = part * PART_SIZE + tl.arange(0, PART_SIZE)
    values = tl.load(logits + row * vocab_size + tokens, mask=tokens < vocab_size, other=-float("inf")).to(tl.float32)
    values = tl.where(values == values, values, -float("inf"))  # NaN is no maximum
    top = tl.max(values)
    # Where all are -inf it is the part's first one, which exists.
    first = tl.min(tl.where(values == top, tokens, _BEYOND))
    tl.store(greatest + row * num_parts + part, top)
    tl.store(candidates + row * num_parts + part, first)


@triton.jit
def _pick_kernel(token_ids, greatest, candidates, num_parts, NUM_PARTS: tl.constexpr):
    row, parts = tl.program_id(0).to(tl.int64), tl.arange(0, NUM_PARTS)
    is_part = parts < num_parts
    top = tl.load(greatest + row * num_parts + parts, mask=is_part, other=-float("inf"))
    candidate = tl.load(candidates + row * num_parts + parts, mask=is_part, other=_BEYOND)
    tl.store(token_ids + row, tl.min(tl.where(top == tl.max(top), candidate, _BEYOND)).to(tl.int64))
