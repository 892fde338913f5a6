"""Pixtral, and Mistral Small 3.1 with its tower (arXiv:2410.07073): pictures of any size, whose rows end with a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from services.common.families.kinds import Activation
from services.common.vision.layout import Layout, PictureShape
from services.common.vision.resize import resize
from services.common.vision.vision_fields import VisionFields

if TYPE_CHECKING:
    from PIL.Image import Image

PIXTRAL = "pixtral"  # as a vision_config names it
_BREAK, _END = "[IMG_BREAK]", "[IMG_END]"
LOW_DETAIL_SIDE = 512


@dataclass(frozen=True, slots=True)
class PixtralTower:
    """The sizes of the tower, and of what makes rows of the prompt of its output."""

    num_layers: int  # that are computed
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    merge_size: int  # of the squares of patches that become a token; in LLaVA's form each patch does
    rope_theta: float
    activation: Activation
    text_norm_eps: float  # which the norm of squares has, too
    width: int  # numbers in a row of the output
    projector_activation: Activation
    has_projector_bias: bool

    def grid(self, shape: PictureShape) -> tuple[int, int]:
        """Rows and columns of patches."""
        return shape.height // self.patch_size, shape.width // self.patch_size

    def num_patches(self, shape: PictureShape) -> int:
        """How many rows the tower computes for a picture."""
        return math.prod(self.grid(shape))

    def num_outputs(self, shape: PictureShape) -> int:
        """How many rows of the prompt it computes for a picture."""
        return self.num_patches(shape) // self.merge_size**2


@dataclass(frozen=True, slots=True)
class PixtralLayout(Layout):
    """A picture that is too large is made smaller; then both sides become multiples of a token's."""

    unit: int  # pixels along a side of what becomes a token
    longest_side: int
    resample: int
    keeps_size: ClassVar[bool] = True
    other_tokens: ClassVar[tuple[str, ...]] = (_BREAK, _END)

    def shape_of(self, height: int, width: int, *, is_low: bool) -> PictureShape:
        longest = min(self.longest_side, LOW_DETAIL_SIDE) if is_low else self.longest_side
        ratio = max(height, width) / longest
        sides = [math.floor(side / ratio) if ratio > 1 else side for side in (height, width)]
        rows, columns = (max(0, side - 1) // self.unit + 1 for side in sides)
        return PictureShape(1, rows * self.unit, columns * self.unit, height, width, rows * (columns + 1))

    def tiles_of(self, picture: Image, shape: PictureShape) -> list[Image]:
        return [resize(picture, (shape.width, shape.height), self.resample)]

    def tokens_of(self, shape: PictureShape, token: str) -> Sequence[str]:
        rows, columns = shape.height // self.unit, shape.width // self.unit
        line = [*[token] * columns, _BREAK]
        return [*(line * rows)[:-1], _END]


def read_mistral3(fields: VisionFields) -> tuple[PixtralTower, PixtralLayout]:
    """The tower and the layout of a model's files."""
    fields.only("model_type", fields.tower.get("model_type"), PIXTRAL)
    return read_pixtral(fields, fields.outer["spatial_merge_size"])


def read_pixtral(fields: VisionFields, merge: int) -> tuple[PixtralTower, PixtralLayout]:
    """The tower and the layout of a model in which one token stands for a square of `merge` x `merge` patches."""
    patch, text = fields.size("patch_size"), fields.outer["text_config"]
    longest = (fields.processor.get("size") or {}).get("longest_edge", 1024)
    if type(longest) is not int or longest < patch * merge:
        raise fields.error("longest_edge", longest, f"expected a whole number of at least {patch * merge}")
    tower = PixtralTower(
        num_layers=fields.num_computed_layers(),
        hidden_size=fields.size("hidden_size"),
        intermediate_size=fields.size("intermediate_size"),
        num_heads=fields.size("num_attention_heads"),
        patch_size=patch,
        merge_size=merge,
        rope_theta=float(fields.tower["rope_parameters"]["rope_theta"]),
        activation=fields.activation(fields.tower, "hidden_act"),
        text_norm_eps=float(text["rms_norm_eps"]),
        width=text["hidden_size"],
        projector_activation=fields.activation(fields.outer, "projector_hidden_act"),
        has_projector_bias=bool(fields.outer["multimodal_projector_bias"]),
    )
    return tower, PixtralLayout(patch * merge, longest, fields.resample)
