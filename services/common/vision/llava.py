"""LLaVA 1.5 (arXiv:2310.03744): a picture, or its middle, in one tile, and a row for each patch of a tower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.common.families.kinds import Activation
from services.common.vision.layout import Layout, PictureShape
from services.common.vision.patch_tower import CLIP, SIGLIP, TowerWithPatches, read_patch_tower
from services.common.vision.pixtral import PIXTRAL, PixtralLayout, PixtralTower, read_pixtral
from services.common.vision.resize import resize
from services.common.vision.vision_fields import VisionFields

if TYPE_CHECKING:
    from PIL.Image import Image


Size = tuple[int, int]  # height and width


@dataclass(frozen=True, slots=True)
class LlavaTower(TowerWithPatches):
    """The tower of CLIP or SigLIP up to one of its layers, and two matrices."""

    drops_class_token: bool
    activation: Activation  # between the matrices
    has_bias: bool
    resolutions: tuple[Size, ...] = ()  # of grids of tiles, height and width; empty: there is one tile
    max_tiles: int | None = None  # the rows of a grid are made as few as those of so many tiles; None: all are kept

    def tile_grid(self, shape: PictureShape) -> tuple[int, int]:
        """Rows and columns of the tiles of a picture."""
        size, side = (shape.original_height, shape.original_width), self.patches.image_size
        height, width = best_resolution(size, self.resolutions)
        return height // side, width // side

    @property
    def rows_of_tile(self) -> int:
        """How many rows of the prompt a tile becomes."""
        return self.patches.num_rows - self.drops_class_token


@dataclass(frozen=True, slots=True)
class CropLayout(Layout):
    """The shorter side gets a given length, and what is in the middle is kept."""

    shorter_side: int
    height: int  # of the middle
    width: int
    resample: int
    num_tokens: int

    def shape_of(self, height: int, width: int, *, is_low: bool) -> PictureShape:
        return PictureShape(1, self.height, self.width, height, width, self.num_tokens)

    def tiles_of(self, picture: Image, shape: PictureShape) -> list[Image]:
        shorter = min(picture.width, picture.height)
        # As transformers computes it: the longer side is cut off to a whole number.
        size = tuple(
            self.shorter_side if side == shorter else int(self.shorter_side * side / shorter)
            for side in (picture.width, picture.height)
        )
        left, top = (size[0] - self.width) // 2, (size[1] - self.height) // 2
        return [resize(picture, size, self.resample).crop((left, top, left + self.width, top + self.height))]


@dataclass(frozen=True, slots=True)
class StretchedLayout(Layout):
    """A picture is stretched to a square."""

    side: int
    resample: int
    num_tokens: int

    def shape_of(self, height: int, width: int, *, is_low: bool) -> PictureShape:
        return PictureShape(1, self.side, self.side, height, width, self.num_tokens)

    def tiles_of(self, picture: Image, shape: PictureShape) -> list[Image]:
        return [resize(picture, (self.side, self.side), self.resample)]


def read_llava(
    fields: VisionFields,
) -> tuple[LlavaTower, CropLayout | StretchedLayout] | tuple[PixtralTower, PixtralLayout]:
    """The tower and the layout of a model's files."""
    if fields.tower.get("model_type") == PIXTRAL:
        fields.only("vision_feature_select_strategy", fields.outer["vision_feature_select_strategy"], "full")
        return read_pixtral(fields, merge=1)
    tower = read_llava_tower(fields)
    side, size = tower.patches.image_size, fields.processor.get("size") or {}
    if "height" in size:  # as SigLIP's processor has it, which cuts nothing off
        fields.only_square("size", side)
        return tower, StretchedLayout(side, fields.resample, tower.rows_of_tile)
    shorter = size.get("shortest_edge", side)
    fields.only("do_pad", bool(fields.processor.get("do_pad", False)), False)
    fields.only_square("crop_size", side)
    if type(shorter) is not int or shorter < side:
        raise fields.error("size", fields.processor.get("size"), f"expected a shortest_edge of at least {side}")
    return tower, CropLayout(shorter, side, side, fields.resample, tower.rows_of_tile)


def read_llava_tower(fields: VisionFields) -> LlavaTower:
    """The tower of all LLaVA models with CLIP or SigLIP."""
    kind = fields.tower.get("model_type")
    fields.only("model_type", kind, CLIP, SIGLIP)
    strategy = fields.outer["vision_feature_select_strategy"]
    # The default leaves the first row out, which is that of a patch in SigLIP's towers.
    fields.only("vision_feature_select_strategy", strategy, *(("default", "full") if kind == CLIP else ("full",)))
    return LlavaTower(
        read_patch_tower(fields, fields.num_computed_layers(), has_final_norm=False),
        drops_class_token=strategy == "default",
        width=fields.outer["text_config"]["hidden_size"],
        activation=fields.activation(fields.outer, "projector_hidden_act"),
        has_bias=bool(fields.outer["multimodal_projector_bias"]),
    )


def best_resolution(size: Size, resolutions: Sequence[Size]) -> Size:
    """The grid that keeps most of a picture's pixels; of several such the one with the fewest of its own."""
    height, width = size

    def suits(resolution: Size) -> tuple[int, int]:
        scale = min(resolution[1] / width, resolution[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - resolution[0] * resolution[1]

    return max(resolutions, key=suits)
