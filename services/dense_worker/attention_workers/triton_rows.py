"""Copies the rows of a step between the dense worker's memory and the data regions of several attention workers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024  # elements that one program copies


@triton.jit
def _copy_rows(
    own,
    table,
    owners,
    places,
    width,
    WORDS: tl.constexpr,
    COLUMN: tl.constexpr,
    GIVES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(owners + row)
    if slot >= 0:
        offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        is_in = offsets < width
        region = tl.load(table + slot * WORDS + COLUMN).to(tl.pointer_type(own.dtype.element_ty))
        theirs = region + tl.load(places + row).to(tl.int64) * width + offsets
        ours = own + row.to(tl.int64) * width + offsets
        if GIVES:
            tl.store(theirs, tl.load(ours, mask=is_in), mask=is_in)
        else:
            tl.store(ours, tl.load(theirs, mask=is_in), mask=is_in)


def copy_rows(
    own: torch.Tensor, table: torch.Tensor, owners: torch.Tensor, places: torch.Tensor, column: int, *, gives: bool
) -> None:
    """Copies each row of `own` to its place in the region of its owner, or with `gives` False from there.

    own: [n, width] without gaps; table: int64 [slots, words], in whose `column` the regions' addresses are;
    owners: int32 [n], the slot of each row, -1 for rows of nobody; places: int32 [n], its row in that region
    """
    num_rows, width = own.shape
    grid = (num_rows, triton.cdiv(width, _BLOCK))
    options = {"WORDS": table.shape[1], "COLUMN": column, "GIVES": gives, "BLOCK": _BLOCK}
    _copy_rows[grid](own, table, owners, places, width, **options)
