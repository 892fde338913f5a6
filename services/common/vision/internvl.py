"""InternVL 2.5 to 3.5 (arXiv:2412.05271): a picture in a grid of tiles, then once more in one tile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from services.common.families.kinds import Activation, NormKind
from services.common.vision.layout import Layout, PictureShape
from services.common.vision.patch_tower import PatchTower, TowerWithPatches
from services.common.vision.resize import resize
from services.common.vision.vision_fields import VisionFields

if TYPE_CHECKING:
    from PIL.Image import Image

_START, _END = "<img>", "</img>"
MAX_TILES = 64  # of a grid: published models have 12
_NORMS = {"layer_norm": NormKind.LAYER, "rms_norm": NormKind.RMS}


@dataclass(frozen=True, slots=True)
class InternVLTower(TowerWithPatches):
    """InternViT, and two matrices that make a row of the prompt of a square of its rows."""

    norm: NormKind  # of its layers
    has_qkv_bias: bool
    has_qk_norms: bool  # over all heads
    square: int  # rows along a side of what becomes a row of the prompt
    activation: Activation  # between the matrices

    @property
    def rows_of_tile(self) -> int:
        """How many rows of the prompt a tile becomes."""
        return (self.patches.num_columns // self.square) ** 2

    def num_outputs(self, shape: PictureShape) -> int:
        return shape.num_tiles * self.rows_of_tile


@dataclass(frozen=True, slots=True)
class GridLayout(Layout):
    """The picture is stretched to a grid of tiles, whose proportions are nearest to its own."""

    side: int  # pixels along a side of a tile
    min_tiles: int  # of a grid
    max_tiles: int
    rows_of_tile: int  # tokens of a tile
    resample: int
    other_tokens: ClassVar[tuple[str, ...]] = (_START, _END)

    def shape_of(self, height: int, width: int, *, is_low: bool) -> PictureShape:
        rows, columns = (1, 1) if is_low else self._grid(height, width)
        # A grid of several tiles is followed by the whole picture in one.
        num_tiles = rows * columns + (rows * columns > 1)
        return PictureShape(num_tiles, self.side, self.side, height, width, num_tiles * self.rows_of_tile + 2)

    def tiles_of(self, picture: Image, shape: PictureShape) -> list[Image]:
        whole = resize(picture, (self.side, self.side), self.resample)
        if shape.num_tiles == 1:
            return [whole]
        rows, columns = self._grid(picture.height, picture.width)
        resized = resize(picture, (columns * self.side, rows * self.side), self.resample)
        corners = [(x * self.side, y * self.side) for y in range(rows) for x in range(columns)]
        return [*(resized.crop((x, y, x + self.side, y + self.side)) for x, y in corners), whole]

    def tokens_of(self, shape: PictureShape, token: str) -> Sequence[str]:
        return [_START, *[token] * (shape.num_tokens - 2), _END]

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns. Of grids that suit it equally a larger one is taken, if the picture fills half of it."""
        best, nearest = (1, 1), math.inf
        sides = range(1, self.max_tiles + 1)
        grids = [(rows, columns) for columns in sides for rows in range(1, self.max_tiles // columns + 1)]
        for rows, columns in sorted(grids, key=math.prod):
            if rows * columns < self.min_tiles:
                continue
            distance = abs(width / height - columns / rows)
            is_half_filled = 2 * width * height > rows * columns * self.side**2
            if distance < nearest or (distance == nearest and is_half_filled):
                best, nearest = (rows, columns), distance
        return best


def read_internvl(fields: VisionFields) -> tuple[InternVLTower, GridLayout]:
    """The tower and the layout of a model's files."""
    outer, tower = fields.outer, fields.tower
    fields.only("model_type", tower.get("model_type"), "internvl_vision")
    fields.only("use_absolute_position_embeddings", tower["use_absolute_position_embeddings"], True)
    fields.only("norm_type", tower["norm_type"], *_NORMS)
    fields.only("vision_feature_layer", outer["vision_feature_layer"], -1)
    fields.only("vision_feature_select_strategy", outer["vision_feature_select_strategy"], "default")
    fields.only("num_channels", tower["num_channels"], 3)
    side = fields.square("image_size")
    patches = PatchTower(
        num_layers=fields.size("num_hidden_layers"),
        hidden_size=fields.size("hidden_size"),
        intermediate_size=fields.size("intermediate_size"),
        num_heads=fields.size("num_attention_heads"),
        image_size=side,
        patch_size=fields.square("patch_size"),
        activation=fields.activation(tower, "hidden_act"),
        norm_eps=float(tower["layer_norm_eps"]),
        has_class_token=True,
        has_final_norm=not tower["use_mean_pooling"],
    )
    ratio, columns = outer["downsample_ratio"], patches.num_columns
    squares = [size for size in range(1, columns + 1) if size * ratio == 1 and columns % size == 0]
    if not squares:
        raise fields.error("downsample_ratio", ratio, f"expected 1 divided by a divisor of {columns}")
    config = InternVLTower(
        patches,
        norm=_NORMS[tower["norm_type"]],
        has_qkv_bias=bool(tower["attention_bias"]),
        has_qk_norms=bool(tower["use_qk_norm"]),
        square=squares[0],
        width=outer["text_config"]["hidden_size"],
        activation=fields.activation(outer, "projector_hidden_act"),
    )
    fields.only("image_seq_length", outer["image_seq_length"], config.rows_of_tile)
    fields.only_square("size", side)
    # `crop_to_patches` is not read: the processor of these models sets it, whatever the file says.
    least, most = (fields.processor.get(name, default) for name, default in (("min_patches", 1), ("max_patches", 12)))
    if type(least) is not int or type(most) is not int or not 1 <= least <= most <= MAX_TILES:
        wanted = f"expected two whole numbers from 1 to {MAX_TILES}, ascending"
        raise fields.error("min_patches and max_patches", (least, most), wanted)
    return config, GridLayout(side, least, most, config.rows_of_tile, fields.resample)
