"""`resize`: what Pillow makes of a picture, by several threads, which have its rows and then its columns."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

MAX_THREADS = 4  # for one picture: the first token waits for it, and other pictures have processes of their own
MIN_PIXELS = 2**18  # before or after: fewer take a few milliseconds


def resize(picture: Image.Image, size: tuple[int, int], resample: int) -> Image.Image:
    """`picture.resize(size, resample)` of a picture in RGB, to the bit; size: width and height."""
    num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    if num_threads == 1 or max(picture.width * picture.height, size[0] * size[1]) < MIN_PIXELS:
        return picture.resize(size, resample)
    return resize_in_bands(picture, size, resample, num_threads)


def resize_in_bands(picture: Image.Image, size: tuple[int, int], resample: int, num_threads: int) -> Image.Image:
    """The same for a picture of any size."""
    from PIL import Image  # only a process that decodes pictures needs it

    (width, height), (new_width, new_height) = picture.size, size
    # Then Pillow may begin with columns. It rounds to bytes between the two, so that the order matters.
    if height > new_height and height * new_width > width * new_height:
        return picture.resize(size, resample)
    middle, resized = Image.new("RGB", (new_width, height)), Image.new("RGB", size)

    def rows(band: tuple[int, int]) -> Image.Image:
        top, bottom = band
        return picture.crop((0, top, width, bottom)).resize((new_width, bottom - top), resample)

    def columns(band: tuple[int, int]) -> Image.Image:
        left, right = band
        return middle.crop((left, 0, right, height)).resize((right - left, new_height), resample)

    with ThreadPoolExecutor(num_threads) as threads:
        bands = _bands(height, num_threads)
        for (top, _), part in zip(bands, threads.map(rows, bands), strict=True):
            middle.paste(part, (0, top))
        bands = _bands(new_width, num_threads)
        for (left, _), part in zip(bands, threads.map(columns, bands), strict=True):
            resized.paste(part, (left, 0))
    return resized


def _bands(length: int, count: int) -> list[tuple[int, int]]:
    """The first place of each band, and the one behind its last."""
    size = -(-length // count)
    return [(start, min(start + size, length)) for start in range(0, length, size)]
