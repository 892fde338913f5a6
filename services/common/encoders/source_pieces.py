"""How the rows of an encoder's outputs cross the seam: both workers cut them into the same pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class SourcePiece(NamedTuple):
    """Consecutive rows of one output."""

    index: int  # of the output, in the order of the plan
    first: int  # its first row in this piece
    num_rows: int


def source_pieces(lengths: Sequence[int], max_rows: int) -> Iterator[list[SourcePiece]]:
    """Cuts outputs of these lengths into parts of up to `max_rows` rows, which cross the seam one after the other."""
    part, num_left = list[SourcePiece](), max_rows
    for index, length in enumerate(lengths):
        first = 0
        while first < length:
            num_rows = min(length - first, num_left)
            part.append(SourcePiece(index, first, num_rows))
            first, num_left = first + num_rows, num_left - num_rows
            if not num_left:
                yield part
                part, num_left = [], max_rows
    if part:
        yield part
