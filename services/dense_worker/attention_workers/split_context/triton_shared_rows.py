"""Copies the rows of a step between the dense worker's memory and the data regions of several attention workers, of
which some rows are in several: their attention is merged by the log-sums of the parts (`channel/log_sums.py`).

Each row has *shares*, one in each region that it is in: the region's slot and the row's place there. `starts`, int32
[n + 1], says where the shares of each row begin in `shares`, int32 [num_shares, 2]. Rows without any are passed by.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.channel.cuda_slots import ATTN_OUT, NUM_SLOTS, QKV

_BLOCK = 1024  # elements that one program gives


def give_rows(qkv: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, shares: torch.Tensor) -> None:
    """Copies each row of qkv, [n, width] without gaps, to all its places. table: as in `copy_rows`."""
    num_rows, width = qkv.shape
    grid = (num_rows, triton.cdiv(width, _BLOCK))
    _give_rows[grid](qkv, table, starts, shares, width, WORDS=table.shape[1], COLUMN=QKV, BLOCK=_BLOCK)


def take_rows(
    attn_out: torch.Tensor,  # [n, num_heads * head_dim] without gaps, written to
    table: torch.Tensor,
    starts: torch.Tensor,
    shares: torch.Tensor,
    num_heads: int,
    qkv_width: int,
) -> None:
    """Copies the output of each row with one share from there, and merges the outputs of rows with several.

    Parts whose log-sum is -inf do not count. A row that has no other parts has zeros.
    """
    num_rows, width = attn_out.shape
    head_dim = width // num_heads
    _take_rows[(num_rows, num_heads)](
        attn_out,
        table,
        starts,
        shares,
        WORDS=table.shape[1],
        ATTN_OUT=ATTN_OUT,
        QKV=QKV,
        WIDTH=width,
        # Of a row of qkv, in float32: where its log-sums begin, and its size.
        FIRST_SUM=width * attn_out.itemsize // 4,
        QKV_WIDTH=qkv_width * attn_out.itemsize // 4,
        HEAD_DIM=head_dim,
        BLOCK=triton.next_power_of_2(head_dim),
        NUM_SLOTS=NUM_SLOTS,
    )


@triton.jit(do_not_specialize_on_alignment=["shares"])  # it begins anywhere
def _give_rows(
    qkv, table, starts, shares, width, WORDS: tl.constexpr, COLUMN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = offsets < width
    values = tl.load(qkv + row.to(tl.int64) * width + offsets, mask=is_in)
    for share in range(tl.load(starts + row), tl.load(starts + row + 1)):
        slot, place = tl.load(shares + 2 * share), tl.load(shares + 2 * share + 1)
        region = tl.load(table + slot * WORDS + COLUMN).to(tl.pointer_type(qkv.dtype.element_ty))
        tl.store(region + place.to(tl.int64) * width + offsets, values, mask=is_in)


@triton.jit(do_not_specialize_on_alignment=["shares"])  # it begins anywhere
def _take_rows(
    attn_out,
    table,
    starts,
    shares,
    WORDS: tl.constexpr,
    ATTN_OUT: tl.constexpr,
    QKV: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST_SUM: tl.constexpr,
    QKV_WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
):
    """One program takes one head of one row."""
    row, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(starts + row), tl.load(starts + row + 1)
    offsets = tl.arange(0, BLOCK)
    is_in = offsets < HEAD_DIM
    ours = attn_out + row.to(tl.int64) * WIDTH + head * HEAD_DIM + offsets
    dtype: tl.constexpr = attn_out.dtype.element_ty
    if end == first + 1:
        slot, place = tl.load(shares + 2 * first), tl.load(shares + 2 * first + 1)
        outputs = tl.load(table + slot * WORDS + ATTN_OUT).to(tl.pointer_type(dtype))
        theirs = outputs + place.to(tl.int64) * WIDTH + head * HEAD_DIM + offsets
        tl.store(ours, tl.load(theirs, mask=is_in), mask=is_in)
    if end > first + 1:
        offs_s = first + tl.arange(0, NUM_SLOTS)
        is_share = offs_s < end
        slots = tl.load(shares + 2 * offs_s, mask=is_share, other=0)
        places = tl.load(shares + 2 * offs_s + 1, mask=is_share, other=0).to(tl.int64)
        sums = tl.load(table + slots * WORDS + QKV, mask=is_share, other=0).to(tl.pointer_type(tl.float32))
        sums += places * QKV_WIDTH + FIRST_SUM + head
        log_sums = tl.load(sums, mask=is_share, other=float("-inf"))
        is_seen = log_sums > float("-inf")  # else the row sees no key there, or there is no such share
        largest = tl.max(tl.where(is_seen, log_sums, -1e38), axis=0)
        weights = tl.where(is_seen, tl.exp(log_sums - largest), 0.0)
        total = tl.sum(weights, axis=0)
        outputs = tl.load(table + slots * WORDS + ATTN_OUT, mask=is_share, other=0).to(tl.pointer_type(dtype))
        outputs += places * WIDTH + head * HEAD_DIM
        mask = is_seen[:, None] & is_in[None, :]
        parts = tl.load(outputs[:, None] + offsets[None, :], mask=mask, other=0.0).to(tl.float32)
        merged = tl.sum(weights[:, None] * parts, axis=0) / tl.where(total > 0.0, total, 1.0)
        tl.store(ours, merged.to(dtype), mask=is_in)
