"""Where a checkpoint has a rank's rows or columns of a parameter: only these are read, as far as its layout allows.

A format says which dimensions of its tensors rows and columns lie along, and how many of them are stored together
(`Conversion.unit`). So one rule serves all: the pieces are widened to whole units, read, converted, and cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from services.dense_worker.kernels.linear.quantized.layer import FLOATS
from services.dense_worker.parameters import Axes, Conversion, Loaded, Pieces, Source, StoredTensor, TensorPart


def part_of(source: Source, row_shape: tuple[int, ...], part: TensorPart) -> Source:
    """The source of some rows, or of some columns, of what `source` fills with rows of this shape."""
    sizes = (source.num_rows, *row_shape)
    if all(pieces in (None, ((0, size),)) for pieces, size in zip(part.dims, sizes, strict=False)):
        return source
    rows = part.dims[0]
    num_rows = source.num_rows if rows is None else sum(end - first for first, end in rows)
    conversion = source.conversion or _plain(source, row_shape)
    runs = (max((each.axes.num_runs for each in conversion.inputs), default=1), 1)
    read, cuts = list[Pieces | None](), list[Pieces | None]()
    for pieces, unit, size, num_runs in zip(part.dims, conversion.unit, sizes, runs, strict=False):
        wide = None if pieces is None or unit is None else _widened(pieces, unit, size)
        if wide is not None and _of_a_run(wide, num_runs, size) is None:
            wide = None
        read.append(wide)
        cuts.append(None if pieces is None or wide == pieces else _within(pieces, wide or ((0, size),)))
    inputs = tuple(_stored_part(each, read, sizes) for each in conversion.inputs)
    narrowed = replace(source, num_rows=num_rows, conversion=replace(conversion, inputs=inputs))
    is_cut = any(each is not None for each in cuts)
    return converted(narrowed, row_shape, TensorPart(tuple(cuts)).of) if is_cut else narrowed


def converted(source: Source, row_shape: tuple[int, ...], change: Callable[[torch.Tensor], torch.Tensor]) -> Source:
    """A source whose rows are changed once they are read."""
    conversion = source.conversion or _plain(source, row_shape)
    convert = conversion.convert
    return replace(source, conversion=replace(conversion, convert=lambda *loaded: change(convert(*loaded))))


def zeros(num_rows: int, row_shape: tuple[int, ...]) -> Source:
    """A source of zeros that no checkpoint has."""
    return Source("", num_rows, Conversion((), lambda: torch.zeros(num_rows, *row_shape)))


def _plain(source: Source, row_shape: tuple[int, ...]) -> Conversion:
    """That of a tensor that is stored as it is here."""
    stored = StoredTensor((source.name,), FLOATS, ((source.num_rows, *row_shape),), axes=Axes(0, 1))
    return Conversion((stored,), _as_loaded, unit=(1, 1))


def _as_loaded(loaded: Loaded) -> torch.Tensor:
    return loaded.tensor


def _stored_part(stored: StoredTensor, read: list[Pieces | None], sizes: tuple[int, ...]) -> StoredTensor:
    """The elements that these pieces of rows and of columns are made of."""
    shape = stored.shapes[0]  # others differ in dimensions of one element
    dims = list[Pieces | None]([None] * len(shape))
    axes, runs = (stored.axes.rows, stored.axes.columns), (stored.axes.num_runs, 1)
    for pieces, axis, size, num_runs in zip(read, axes, sizes, runs, strict=False):
        own = None if pieces is None or axis is None else _of_a_run(pieces, num_runs, size)
        if own is not None:
            length, stored_length = size // num_runs, shape[axis]
            is_exact = all(end * stored_length % length == 0 for piece in own for end in piece)
            assert is_exact, f"{stored}: {pieces} of {size} share elements with others"
            dims[axis] = tuple((first * stored_length // length, end * stored_length // length) for first, end in own)
    while dims and dims[-1] is None:
        dims.pop()
    return replace(stored, part=TensorPart(tuple(dims))) if dims else stored


def _of_a_run(pieces: Pieces, num_runs: int, size: int) -> Pieces | None:
    """The pieces in the first of equal runs, if each run has the same ones."""
    length = size // num_runs
    own = tuple(piece for piece in pieces if piece[1] <= length)
    of_all = ((first + run * length, end + run * length) for run in range(num_runs) for first, end in own)
    return own if tuple(of_all) == pieces else None


def _widened(pieces: Pieces, unit: int, size: int) -> Pieces:
    """The fewest pieces of whole units that have these pieces of `size` in them."""
    wide = list[tuple[int, int]]()
    for first, end in pieces:
        first, end = first // unit * unit, min(size, -(-end // unit) * unit)
        if wide and first < wide[-1][1]:
            first, _ = wide.pop()
        wide.append((first, end))
    return tuple(wide)


def _within(pieces: Pieces, wide: Pieces) -> Pieces:
    """Where pieces lie once the wider ones follow one another."""
    found, before = list[tuple[int, int]](), 0
    for begin, stop in wide:
        found += [(first - begin + before, end - begin + before) for first, end in pieces if begin <= first < stop]
        before += stop - begin
    return tuple(found)
