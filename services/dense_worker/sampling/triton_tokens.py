"""What lies between two steps' matrix products on a GPU: a step's tokens are kept, and the next step is fed with them.

A kernel writes the tokens to the host. The copy engine would keep the next step's first kernel waiting: from the kernel
before to the copy, and from the copy to the kernel behind it, the device takes some 10 µs each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.common.compile_kernels import launch

_BLOCK_ROWS = 128


def compile_kernels(device: torch.device) -> None:
    """Warms up the kernels."""
    numbers = torch.zeros(2, 1, dtype=torch.int64, device=device)
    on_host = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    keep_tokens(numbers[0], numbers[0], numbers[1], on_host, only_compiles=True)
    feed_tokens(numbers[0], numbers[0], numbers[1], only_compiles=True)


def keep_tokens(
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    last_token: torch.Tensor,
    on_host: torch.Tensor,
    *,
    only_compiles: bool = False,
) -> None:
    """Stores each row's token in `last_token` at the row's slot, and in pinned memory. Does not wait for the device.

    token_ids, slots: int64 [r]; on_host: int64 [r]
    """
    num_rows = len(token_ids)
    grid, operands = (triton.cdiv(num_rows, _BLOCK_ROWS),), (token_ids, slots, last_token, on_host, num_rows)
    launch(_keep_kernel, grid, *operands, only_compiles=only_compiles, BLOCK_ROWS=_BLOCK_ROWS, num_warps=4)


def feed_tokens(
    token_ids: torch.Tensor, fed_slots: torch.Tensor, last_token: torch.Tensor, *, only_compiles: bool = False
) -> torch.Tensor:
    """The tokens of a step's rows, int64 [n]: `token_ids`, or those in `last_token` where `fed_slots` are not negative.

    token_ids, fed_slots: int64 [n]
    """
    num_rows, fed = len(token_ids), torch.empty_like(token_ids)
    grid, operands = (triton.cdiv(num_rows, _BLOCK_ROWS),), (token_ids, fed_slots, last_token, fed, num_rows)
    launch(_feed_kernel, grid, *operands, only_compiles=only_compiles, BLOCK_ROWS=_BLOCK_ROWS, num_warps=4)
    return fed


# Rows of a step's input begin at any number: by their alignment there would be several kernels.
@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["token_ids", "slots", "last_token", "on_host"]
)
def _keep_kernel(token_ids, slots, last_token, on_host, num_rows, BLOCK_ROWS: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = rows < num_rows
    tokens = tl.load(token_ids + rows, mask=is_row)
    tl.store(last_token + tl.load(slots + rows, mask=is_row, other=0), tokens, mask=is_row)
    tl.store(on_host + rows, tokens, mask=is_row)


@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["token_ids", "fed_slots", "last_token", "fed"]
)
def _feed_kernel(token_ids, fed_slots, last_token, fed, num_rows, BLOCK_ROWS: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = rows < num_rows
    slots = tl.load(fed_slots + rows, mask=is_row, other=-1)
    tokens = tl.load(token_ids + rows, mask=is_row & (slots < 0), other=0)
    tokens += tl.load(last_token + slots, mask=slots >= 0, other=0)
    tl.store(fed + rows, tokens, mask=is_row)
