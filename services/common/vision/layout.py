"""`Layout`: how a family cuts a picture into tiles of pixels, and which tokens of the prompt stand for it.

The gateway uses it, and the process that decodes pictures. The results agree with transformers' image processors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

    @property
    def num_bytes(self) -> int:
        """Of all tiles: three colours, a byte each."""
        return 3 * self.num_tiles * self.height * self.width


class Layout(Protocol):
    """Of one model. What is given here is that of most families."""

    marker: ClassVar[str] = ""  # what the chat template writes for a picture; empty: the picture's token
    # What is tokenized instead, with "{}" for the picture's token; empty: the token alone.
    text: ClassVar[str] = ""
    other_tokens: ClassVar[Sequence[str]] = ()  # that stand for pictures, too, but have embeddings as other tokens have

    def shape_of(self, height: int, width: int, *, is_low: bool) -> PictureShape:
        """What becomes of a picture. `is_low`: the client asks for little detail.

        Raises `InvalidRequest` if the model cannot read such a picture.
        """

    def tiles_of(self, picture: Image, shape: PictureShape) -> list[Image]:
        """The tiles of a picture in RGB, each with the height and width of the shape."""

    def tokens_of(self, shape: PictureShape, token: str) -> Sequence[str]:
        """The tokens that stand for it; `token`: the one whose embeddings are the tower's output."""
        return [token] * shape.num_tokens
