"""`resize`: what Pillow makes of a picture, by several threads, which have its rows and its columns in Pillow's order.

Pillow rounds to bytes between the two, so that the order matters.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from services.common.errors import InvalidRequest

if TYPE_CHECKING:
    from PIL import Image

MAX_THREADS = 4  # for one picture: the first token waits for it, and other pictures have processes of their own
MAX_ASPECT_RATIO = 200  # of a picture that is resized
MIN_PIXELS = 2**18  # before or after: fewer take a few milliseconds

Size = tuple[int, int]  # width and height


def check_sides(what: str, width: int, height: int) -> None:
    """Raises `InvalidRequest`, in which `what` names the picture, if it is too long and narrow."""
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise InvalidRequest(
            f"{what} has {width} x {height} pixels: the longer side may be {MAX_ASPECT_RATIO} times the other"
        )


def resize(picture: Image.Image, size: Size, resample: int) -> Image.Image:
    """`picture.resize(size, resample)` of a picture in RGB, to the bit."""
    num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    if num_threads == 1 or max(picture.width * picture.height, size[0] * size[1]) < MIN_PIXELS:
        return picture.resize(size, resample)
    return resize_in_bands(picture, size, resample, num_threads)


def begins_with_columns(size: Size, new_size: Size) -> bool:
    """Whether Pillow 13 gives columns their new length before rows. It was found by comparison, for many sizes."""
    (width, height), (new_width, new_height) = size, new_size
    return height > new_height and height - new_height > 2 * (width - new_width)


def resize_in_bands(picture: Image.Image, size: Size, resample: int, num_threads: int) -> Image.Image:
    """`picture.resize(size, resample)` by several threads, each of which makes some of the lines."""
    with ThreadPoolExecutor(num_threads) as threads:
        for axis in (1, 0) if begins_with_columns(picture.size, size) else (0, 1):
            picture = _resize_lines(picture, axis, size[axis], resample, threads, num_threads)
    return picture


def _resize_lines(
    picture: Image.Image, axis: int, length: int, resample: int, threads: ThreadPoolExecutor, num_bands: int
) -> Image.Image:
    """Gives rows (axis 0) or columns (1) a new length."""
    from PIL import Image  # only a process that decodes pictures needs it

    def resized(size: Size) -> Size:
        return (length, size[1]) if axis == 0 else (size[0], length)

    def box(band: tuple[int, int], size: Size) -> tuple[int, int, int, int]:
        first, behind = band
        return (0, first, size[0], behind) if axis == 0 else (first, 0, behind, size[1])

    def resize_band(band: tuple[int, int]) -> Image.Image:
        part = picture.crop(box(band, picture.size))
        return part.resize(resized(part.size), resample)

    found = Image.new("RGB", resized(picture.size))
    bands = _bands(picture.size[1 - axis], num_bands)
    for band, part in zip(bands, threads.map(resize_band, bands), strict=True):
        found.paste(part, box(band, found.size)[:2])
    return found


def _bands(length: int, count: int) -> list[tuple[int, int]]:
    """The first place of each band, and the one behind its last."""
    size = -(-length // count)
    return [(start, min(start + size, length)) for start in range(0, length, size)]
