"""LLaVA-NeXT: a picture in the tiles of the grid that suits it best, and before them once more in one tile.

LLaVA-OneVision (arXiv:2408.03326) has larger grids, and makes a grid of rows smaller that has too many.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from services.common.vision.layout import Layout, PictureShape
from services.common.vision.llava import LlavaTower, Size, best_resolution, read_llava_tower
from services.common.vision.resize import resize
from services.common.vision.vision_fields import VisionFields

if TYPE_CHECKING:
    from PIL.Image import Image

_MAX_RATIO = 1.1  # of the sides of a grid to those that it may have; the published code has it, too


@dataclass(frozen=True, slots=True)
class TiledLayout(Layout):
    """The picture keeps its proportions, with black borders; tokens of borders are left out."""

    side: int  # pixels along a side of a tile
    resolutions: tuple[Size, ...]  # of grids of tiles
    tile_columns: int  # patches along a side of a tile
    rows_of_tile: int  # tokens of the tile with the whole picture
    resample: int
    max_tiles: int | None = None  # the rows of a grid are made as few as those of so many tiles; None: all are kept

    def shape_of(self, height: int, width: int, *, is_low: bool) -> PictureShape:
        rows, columns = (size // self.side for size in best_resolution((height, width), self.resolutions))
        grid = rows * self.tile_columns, columns * self.tile_columns
        top, left = borders((height, width), grid)
        lines, size = shrunk((grid[0] - 2 * top, grid[1] - 2 * left), self.tile_columns, self.max_tiles)
        # Each line of patches ends with a token of its own.
        num_tokens = self.rows_of_tile + lines * (size + 1)
        return PictureShape(1 + rows * columns, self.side, self.side, height, width, num_tokens)

    def tiles_of(self, picture: Image, shape: PictureShape) -> list[Image]:
        target_height, target_width = best_resolution((picture.height, picture.width), self.resolutions)
        by_width, by_height = target_width / picture.width, target_height / picture.height
        if by_width < by_height:
            size = target_width, min(math.ceil(picture.height * by_width), target_height)
        else:
            size = min(math.ceil(picture.width * by_height), target_width), target_height
        resized = resize(picture, size, self.resample)
        left, top = (target_width - size[0]) // 2, (target_height - size[1]) // 2
        padded = resized.crop((-left, -top, target_width - left, target_height - top))  # what is outside is black
        tiles = [resize(picture, (self.side, self.side), self.resample)]
        for y in range(0, target_height, self.side):
            tiles += [padded.crop((x, y, x + self.side, y + self.side)) for x in range(0, target_width, self.side)]
        return tiles


def borders(size: Size, grid: Size) -> Size:
    """How many lines of patches above (and as many below), and to the left and right, belong to borders alone."""
    height, width = size
    if width / height > grid[1] / grid[0]:
        return (grid[0] - int(round(height * (grid[1] / width), 7))) // 2, 0
    return 0, (grid[1] - int(round(width * (grid[0] / height), 7))) // 2


def shrunk(grid: Size, tile_columns: int, max_tiles: int | None) -> Size:
    """The lines of patches of a picture and their length, after a grid that has too many was made smaller."""
    ratio = 0.0 if max_tiles is None else math.sqrt(math.prod(grid) / (max_tiles * tile_columns**2))
    return (int(grid[0] // ratio), int(grid[1] // ratio)) if ratio > _MAX_RATIO else grid


def read_llava_next(fields: VisionFields) -> tuple[LlavaTower, TiledLayout]:
    """The tower and the layout of a model's files."""
    tower = read_llava_tower(fields)
    side = tower.patches.image_size
    fields.only_square("crop_size", side)
    fields.only("size", (fields.processor.get("size") or {}).get("shortest_edge", side), side)
    return _read_tiles(fields, tower)


def read_llava_onevision(fields: VisionFields) -> tuple[LlavaTower, TiledLayout]:
    """The tower and the layout of a model's files."""
    tower = read_llava_tower(fields)
    side = tower.patches.image_size
    fields.only_square("size", side)
    ratio = fields.outer["vision_aspect_ratio"]
    if not (found := re.fullmatch(r"anyres_max_([1-9]\d?)", ratio)):
        raise fields.error("vision_aspect_ratio", ratio, "expected anyres_max_ and a number from 1 to 99")
    return _read_tiles(fields, tower, int(found[1]))


def _read_tiles(
    fields: VisionFields, tower: LlavaTower, max_tiles: int | None = None
) -> tuple[LlavaTower, TiledLayout]:
    side, resolutions = tower.patches.image_size, fields.outer["image_grid_pinpoints"]
    if tower.rows_of_tile != tower.patches.num_columns**2:
        strategy = fields.outer["vision_feature_select_strategy"]
        raise fields.error("vision_feature_select_strategy", strategy, "expected 'default', without the class token")
    is_list = isinstance(resolutions, list | tuple) and len(resolutions) > 0
    if not is_list or any(len(each) != 2 or any(size < side or size % side for size in each) for each in resolutions):
        raise fields.error("image_grid_pinpoints", resolutions, f"expected pairs of multiples of {side}")
    given = fields.processor.get("image_grid_pinpoints", resolutions)
    fields.only("image_grid_pinpoints", [list(each) for each in given], [list(each) for each in resolutions])
    pairs = tuple((height, width) for height, width in resolutions)
    tower = replace(tower, resolutions=pairs, max_tiles=max_tiles)
    columns = tower.patches.num_columns
    return tower, TiledLayout(side, pairs, columns, tower.rows_of_tile, fields.resample, max_tiles)
