"""`resample`: Pillow's resize on any device, to the bit: whole numbers alone, rounded to bytes after rows and columns.

What Pillow computes is in its `src/libImaging/Resample.c`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch

from services.common.vision.resize import begins_with_columns
from services.dense_worker.sampling.upload import upload

PRECISION_BITS = 32 - 8 - 2  # of Pillow's weights of bytes
HALF = 1 << (PRECISION_BITS - 1)  # to round by


def resample(pixels: torch.Tensor, height: int, width: int, filter_number: int) -> torch.Tensor:
    """uint8 [old_height, old_width, colours] -> uint8 [height, width, colours]. filter_number: of `layout.FILTERS`"""
    for dim, size in passes_of(pixels.shape, height, width):
        pixels = _resample_lines(pixels, dim, size, filter_number)
    return pixels


def passes_of(shape: Sequence[int], height: int, width: int) -> Iterator[tuple[int, int]]:
    """The dimensions of pixels [old_height, old_width, colours] whose lines get a new length, in order, and that."""
    lengths = (height, width)
    for dim in (0, 1) if begins_with_columns((shape[1], shape[0]), (width, height)) else (1, 0):
        if shape[dim] != lengths[dim]:
            yield dim, lengths[dim]


def _resample_lines(pixels: torch.Tensor, dim: int, size: int, filter_number: int) -> torch.Tensor:
    """Gives all lines along a dimension a new length."""
    old = pixels.shape[dim]
    first, *weights = upload(taps_of(old, size, filter_number), pixels.device)
    shape = [1] * pixels.dim()
    shape[dim] = size
    numbers = pixels.int()
    total = torch.full((), HALF, dtype=torch.int32, device=pixels.device)
    for tap, weight in enumerate(weights):
        place = (first + tap).clamp_(max=old - 1)
        total = numbers.index_select(dim, place).mul_(weight.view(shape)).add_(total)
    return total.bitwise_right_shift_(PRECISION_BITS).clamp_(0, 255).to(torch.uint8)


@lru_cache(maxsize=16)
def taps_of(old: int, new: int, filter_number: int) -> np.ndarray:
    """Of each number of a side, which of the old side it is made of: the first, the weights of it and of those behind.

    int32 [1 + taps, new]; weights of places behind the old side are 0
    """
    function, support = _FILTERS[filter_number]
    scale = old / new
    stretch = max(scale, 1.0)
    support *= stretch
    centers = (np.arange(new) + 0.5) * scale
    first = np.maximum((centers - support + 0.5).astype(np.int64), 0)
    behind = np.minimum((centers + support + 0.5).astype(np.int64), old)
    places = first + np.arange(math.ceil(support) * 2 + 1)[:, None]
    shares = np.where(places < behind, function((places - centers + 0.5) * (1.0 / stretch)), 0.0)
    total = np.zeros(new)
    for each in shares:  # one after the other, as the last bits of a sum depend on it
        total += each
    whole = np.trunc(shares / total * (1 << PRECISION_BITS) + np.where(shares < 0, -0.5, 0.5))
    return np.concatenate((first[None], whole)).astype(np.int32)


def _bilinear(x: np.ndarray) -> np.ndarray:
    return np.maximum(1.0 - np.abs(x), 0.0)


def _bicubic(x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * -0.5
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _lanczos(x: np.ndarray) -> np.ndarray:
    return np.where((x >= -3.0) & (x < 3.0), np.sinc(x) * np.sinc(x / 3), 0.0)


_FILTERS = {1: (_lanczos, 3.0), 2: (_bilinear, 1.0), 3: (_bicubic, 2.0)}
