"""`Layout`: how a family cuts a picture into tiles of pixels, and which tokens of the prompt stand for it.

The gateway uses it, and the process that decodes pictures. The results agree with transformers' image processors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class PictureShape:
    """The sizes of a picture as a tower reads it."""

    num_tiles: int
    height: int  # of each tile, in pixels
    width: int
    original_height: int  # of the client's picture
    original_width: int
    num_tokens: int  # of the prompt that stand for it, all in a row
    grid_rows: int = 0  # of their grid, for rotary embeddings with several axes; 0: they have positions as text has
    grid_columns: int = 0
    # The filter, as Pillow numbers it, by which the dense worker resizes the client's pixels; None: that has been done.
    resample: int | None = None

    @property
    def pixels_shape(self) -> tuple[int, int, int, int]:
        """Of the pixels that the dense worker gets: tiles, height, width, and three colours of a byte each."""
        if self.resample is not None:
            return 1, self.original_height, self.original_width, 3
        return self.num_tiles, self.height, self.width, 3

    @property
    def num_bytes(self) -> int:
        """Of these pixels."""
        return math.prod(self.pixels_shape)


class Layout(Protocol):
    """Of one model. What is given here is that of most families."""

    resample: int  # the filter, as Pillow numbers it
    marker: ClassVar[str] = ""  # what the chat template writes for a picture; empty: the picture's token
    # What is tokenized instead, with "{}" for the picture's token; empty: the token alone.
    text: ClassVar[str] = ""
    other_tokens: ClassVar[Sequence[str]] = ()  # that stand for pictures, too, but have embeddings as other tokens have
    # Its one tile is the picture, resized to about its own size by the filter `resample`.
    keeps_size: ClassVar[bool] = False

    def shape_of(self, height: int, width: int, *, is_low: bool) -> PictureShape:
        """What becomes of a picture. `is_low`: the client asks for little detail.

        Raises `InvalidRequest` if the model cannot read such a picture.
        """

    def tiles_of(self, picture: Image, shape: PictureShape) -> list[Image]:
        """The tiles of a picture in RGB, each with the height and width of the shape."""

    def tokens_of(self, shape: PictureShape, token: str) -> Sequence[str]:
        """The tokens that stand for it; `token`: the one whose embeddings are the tower's output."""
        return [token] * shape.num_tokens


# The filters that a dense worker has, as Pillow numbers them: Lanczos, bilinear and bicubic.
FILTERS = (1, 2, 3)
MAX_GROWTH = 2  # how many times the bytes of the resized picture the client's may have, if the worker resizes it


def resized_by_worker(layout: Layout, shape: PictureShape) -> PictureShape:
    """The same with pixels that the dense worker resizes, if it can, and if they are not far more."""
    size, original = (shape.height, shape.width), (shape.original_height, shape.original_width)
    if not layout.keeps_size or layout.resample not in FILTERS or size == original:
        return shape
    if math.prod(original) > MAX_GROWTH * math.prod(size):
        return shape
    return replace(shape, resample=layout.resample)
