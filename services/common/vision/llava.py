"""LLaVA 1.5 (arXiv:2310.03744): a picture, or its middle, in one tile, and a row for each patch of a tower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from services.common.families.kinds import Activation
from services.common.vision.layout import PictureShape
from services.common.vision.patch_tower import CLIP, SIGLIP, PatchTower, read_patch_tower
from services.common.vision.pixtral import PIXTRAL, PixtralLayout, PixtralTower, read_pixtral
from services.common.vision.resize import resize
from services.common.vision.vision_fields import VisionFields

if TYPE_CHECKING:
    from PIL.Image import Image


Size = tuple[int, int]  # height and width


@dataclass(frozen=True, slots=True)
class LlavaTower:
    """The tower of CLIP or SigLIP up to one of its layers, and two matrices."""

    patches: PatchTower
    drops_class_token: bool
    width: int  # numbers in a row of the output
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

    def num_patches(self, shape: PictureShape) -> int:
        """How many rows the tower computes for a picture."""
        return self.patches.num_patches(shape)

    def num_outputs(self, shape: PictureShape) -> int:
        """How many rows of the prompt it computes for a picture."""
        return shape.num_tokens


@dataclass(frozen=True, slots=True)
class CropLayout:
    """The shorter side gets a given length, and what is in the middle is kept."""

    shorter_side: int
    height: int  # of the middle
    width: int
    resample: int
    num_tokens: int
    marker: ClassVar[str] = ""
    text: ClassVar[str] = ""
    other_tokens: ClassVar[tuple[str, ...]] = ()

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

    def tokens_of(self, shape: PictureShape, token: str) -> Sequence[str]:
        return [token] * shape.num_tokens


@dataclass(frozen=True, slots=True)
class StretchedLayout:
    """A picture is stretched to a square."""

    side: int
    resample: int
    num_tokens: int
    marker: ClassVar[str] = ""
    text: ClassVar[str] = ""
    other_tokens: ClassVar[tuple[str, ...]] = ()

    def shape_of(self, height: int, width: int, *, is_low: bool) -> PictureShape:
        return PictureShape(1, self.side, self.side, height, width, self.num_tokens)

    def tiles_of(self, picture: Image, shape: PictureShape) -> list[Image]:
        return [resize(picture, (self.side, self.side), self.resample)]

    def tokens_of(self, shape: PictureShape, token: str) -> Sequence[str]:
        return [token] * shape.num_tokens


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
        fields.only("size", (size["height"], size.get("width")), (side, side))
        return tower, StretchedLayout(side, fields.resample, tower.rows_of_tile)
    shorter = size.get("shortest_edge", side)
    crop = fields.processor.get("crop_size") or {"height": side, "width": side}
    fields.only("do_pad", bool(fields.processor.get("do_pad", False)), False)
    fields.only("crop_size", (crop["height"], crop["width"]), (side, side))
    if type(shorter) is not int or shorter < side:
        raise fields.error("size", fields.processor.get("size"), f"expected a shortest_edge of at least {side}")
    return tower, CropLayout(shorter, side, side, fields.resample, tower.rows_of_tile)


def read_llava_tower(fields: VisionFields) -> LlavaTower:
    """The tower of all LLaVA models with CLIP or SigLIP."""
    kind = fields.tower.get("model_type")
    fields.only("model_type", kind, CLIP, SIGLIP)
    layer, num_layers = fields.outer["vision_feature_layer"], fields.size("num_hidden_layers")
    if type(layer) is not int or not -num_layers <= layer <= num_layers:
        raise fields.error("vision_feature_layer", layer, f"expected one layer from {-num_layers} to {num_layers}")
    # Hidden states are counted from the embedding: -1 is what the last layer gives.
    num_computed = layer if layer >= 0 else num_layers + 1 + layer
    strategy = fields.outer["vision_feature_select_strategy"]
    # The default leaves the first row out, which is that of a patch in SigLIP's towers.
    fields.only("vision_feature_select_strategy", strategy, *(("default", "full") if kind == CLIP else ("full",)))
    return LlavaTower(
        read_patch_tower(fields, num_computed, has_final_norm=False),
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
