"""Qwen2.5-VL and Qwen3-VL: pictures of any size, in patches, four of which become a token."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from services.common.families.kinds import Activation
from services.common.vision.layout import Layout, PictureShape
from services.common.vision.resize import check_sides, resize
from services.common.vision.vision_fields import VisionFields

if TYPE_CHECKING:
    from PIL.Image import Image

LOW_DETAIL_PIXELS = 512 * 512


@dataclass(frozen=True, slots=True)
class QwenTower:
    """The sizes of the tower."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    num_frames: int  # that a patch has; a picture is repeated
    merge_size: int  # of the squares of patches that become a token
    window_size: int  # of squares of patches that see each other, in tokens; 0: all do in all layers
    full_layers: tuple[int, ...]  # in spite of a window their patches all see each other
    out_hidden_size: int  # of the model of text
    activation: Activation
    norm_eps: float = 1e-6
    num_position_columns: int = 0  # of a square table of learned positions; 0: there is none
    deep_layers: tuple[int, ...] = ()  # whose output becomes rows, too, that are added after the first text layers

    @property
    def width(self) -> int:
        """Numbers in a row of the output, with those of its deep layers."""
        return self.out_hidden_size * (1 + len(self.deep_layers))

    @property
    def patch_dim(self) -> int:
        """Numbers in a patch."""
        return 3 * self.num_frames * self.patch_size**2

    def num_patches(self, shape: PictureShape) -> int:
        """How many rows the tower computes for a picture."""
        return shape.height * shape.width // self.patch_size**2

    def num_outputs(self, shape: PictureShape) -> int:
        """How many rows of the prompt it computes for a picture."""
        return shape.num_tokens


@dataclass(frozen=True, slots=True)
class QwenLayout(Layout):
    """A picture keeps its proportions nearly: both sides become multiples of a token's (transformers' smart_resize)."""

    unit: int  # pixels along a side of what becomes a token
    min_pixels: int
    max_pixels: int
    resample: int  # as Pillow numbers its filters
    keeps_size: ClassVar[bool] = True

    def shape_of(self, height: int, width: int, *, is_low: bool) -> PictureShape:
        most = max(self.min_pixels, min(self.max_pixels, LOW_DETAIL_PIXELS)) if is_low else self.max_pixels
        check_sides("a picture", width, height)
        rows, columns = (max(1, round(side / self.unit)) for side in (height, width))
        if rows * columns * self.unit**2 > most:
            shrink = math.sqrt(height * width / most) * self.unit
            rows, columns = (max(1, math.floor(side / shrink)) for side in (height, width))
        elif rows * columns * self.unit**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width)) / self.unit
            rows, columns = (math.ceil(side * grow) for side in (height, width))
        return PictureShape(
            1, rows * self.unit, columns * self.unit, height, width, rows * columns, rows, columns
        )

    def tiles_of(self, picture: Image, shape: PictureShape) -> list[Image]:
        return [resize(picture, (shape.width, shape.height), self.resample)]


def read_qwen2_5_vl(fields: VisionFields) -> tuple[QwenTower, QwenLayout]:
    """The tower and the layout of a model's files."""
    patch, merge = fields.size("patch_size"), fields.size("spatial_merge_size")
    window = fields.size("window_size") // merge // patch
    if not window:
        raise fields.error("window_size", fields.size("window_size"), f"expected at least {merge * patch}")
    tower = replace(_read_tower(fields), window_size=window, full_layers=tuple(fields.tower["fullatt_block_indexes"]))
    return tower, read_qwen_layout(fields, patch * merge)


def read_qwen3_vl(fields: VisionFields) -> tuple[QwenTower, QwenLayout]:
    """The tower and the layout of a model's files."""
    patch, merge = fields.size("patch_size"), fields.size("spatial_merge_size")
    num_positions, deep = fields.size("num_position_embeddings"), tuple(fields.tower["deepstack_visual_indexes"])
    num_text_layers = fields.outer["text_config"]["num_hidden_layers"]
    if math.isqrt(num_positions) ** 2 != num_positions:
        raise fields.error("num_position_embeddings", num_positions, "expected a square")
    if sorted(set(deep)) != list(deep) or len(deep) >= num_text_layers:
        raise fields.error("deepstack_visual_indexes", deep, f"expected fewer than {num_text_layers}, ascending")
    tower = replace(_read_tower(fields), num_position_columns=math.isqrt(num_positions), deep_layers=deep)
    return tower, read_qwen_layout(fields, patch * merge)


def _read_tower(fields: VisionFields) -> QwenTower:
    """What both have, without windows."""
    return QwenTower(
        num_layers=fields.size("depth"),
        hidden_size=fields.size("hidden_size"),
        intermediate_size=fields.size("intermediate_size"),
        num_heads=fields.size("num_heads"),
        patch_size=fields.size("patch_size"),
        num_frames=fields.size("temporal_patch_size"),
        merge_size=fields.size("spatial_merge_size"),
        window_size=0,
        full_layers=(),
        out_hidden_size=fields.size("out_hidden_size"),
        activation=fields.activation(fields.tower, "hidden_act"),
    )


def read_qwen_layout(fields: VisionFields, unit: int) -> QwenLayout:
    """The layout, by the sizes of the image processor in their older and newer spelling."""
    size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280} | (fields.processor.get("size") or {})
    least = fields.processor.get("min_pixels") or size["shortest_edge"]
    most = fields.processor.get("max_pixels") or size["longest_edge"]
    if not 0 < least <= most:
        raise fields.error("min_pixels", least, f"expected more than 0 and at most its max_pixels {most}")
    return QwenLayout(unit, least, most, fields.resample)
