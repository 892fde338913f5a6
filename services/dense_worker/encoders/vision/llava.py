"""The towers of LLaVA models: CLIP's or SigLIP's, and two matrices that make rows of the prompt of its output."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from services.common.vision.llava import LlavaTower
from services.common.vision.llava_next import borders, shrunk
from services.common.vision.pixtral import PixtralTower
from services.common.vision.vision_config import PixelScale
from services.dense_worker.encoders.vision.layer import Projector, build_projector
from services.dense_worker.encoders.vision.operations import TowerOperations
from services.dense_worker.encoders.vision.patch_tower import PatchEncoder, build_patch_encoder
from services.dense_worker.encoders.vision.picture import Picture
from services.dense_worker.encoders.vision.pixtral import PixtralVisionTower, build_pixtral_tower
from services.dense_worker.model.allocator import WeightAllocator
from services.dense_worker.parameters import Parameter, Source


@dataclass(frozen=True, slots=True)
class LlavaVisionTower:
    """LLaVA 1.5: each picture is one tile."""

    config: LlavaTower
    encoder: PatchEncoder
    projector: Projector

    def parts(
        self, pictures: Sequence[Picture], pixels: PixelScale, operations: TowerOperations
    ) -> Generator[None, None, list[torch.Tensor]]:
        """Rows [num_tokens, width] of each picture."""
        return list((yield from self.tiles(pictures, pixels, operations)))

    def tiles(
        self, pictures: Sequence[Picture], pixels: PixelScale, operations: TowerOperations
    ) -> Generator[None, None, torch.Tensor]:
        """Rows [rows_of_tile, width] of each tile of all pictures."""
        rows = yield from self.encoder.parts(pictures, pixels, operations)
        if self.config.drops_class_token:
            rows = rows[:, 1:]
        return operations.run(self.projector, rows.flatten(0, 1)).unflatten(0, rows.shape[:2])


def build_any_llava_tower(
    config: LlavaTower | PixtralTower, allocator: WeightAllocator
) -> LlavaVisionTower | PixtralVisionTower:
    """The tower, uninitialised: Pixtral's, or CLIP's or SigLIP's."""
    if isinstance(config, PixtralTower):
        return build_pixtral_tower(config, allocator)
    return build_llava_tower(config, allocator)


def build_llava_tower(config: LlavaTower, allocator: WeightAllocator) -> LlavaVisionTower:
    """The tower, uninitialised, with the names of its tensors in checkpoints."""
    return LlavaVisionTower(
        config,
        build_patch_encoder(config.patches, allocator),
        build_projector(config.patches.hidden_size, config.width, config.activation, config.has_bias, allocator),
    )


@dataclass(frozen=True, slots=True)
class LlavaNextVisionTower:
    """LLaVA-NeXT and OneVision: the first tile of a picture is all of it, the others are its parts, row by row."""

    config: LlavaTower
    tower: LlavaVisionTower
    newline: Parameter  # [width]: the row at the end of each line of patches

    def parts(
        self, pictures: Sequence[Picture], pixels: PixelScale, operations: TowerOperations
    ) -> Generator[None, None, list[torch.Tensor]]:
        """Rows [num_tokens, width] of each picture."""
        rows = yield from self.tower.tiles(pictures, pixels, operations)
        tiles = rows.split([each.shape.num_tiles for each in pictures])
        return [self._arrange(own, picture) for own, picture in zip(tiles, pictures, strict=True)]

    def _arrange(self, tiles: torch.Tensor, picture: Picture) -> torch.Tensor:
        """tiles [num_tiles, rows_of_tile, width] -> the rows of the whole picture, then lines without its borders."""
        shape, side = picture.shape, self.config.patches.num_columns
        size = shape.original_height, shape.original_width
        num_rows, num_columns = self.config.tile_grid(shape)
        grid = tiles[1:].view(num_rows, num_columns, side, side, -1).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        top, left = borders(size, (num_rows * side, num_columns * side))
        inside = grid[top : len(grid) - top, left : grid.shape[1] - left]
        kept = shrunk((inside.shape[0], inside.shape[1]), side, self.config.max_tiles)
        if kept != inside.shape[:2]:
            inside = F.interpolate(inside.permute(2, 0, 1)[None], kept, mode="bilinear")[0].permute(1, 2, 0)
        lines = torch.cat((inside, self.newline.data.expand(len(inside), 1, -1)), dim=1)
        return torch.cat((tiles[0], lines.flatten(0, 1)))


def build_llava_next_tower(config: LlavaTower, allocator: WeightAllocator) -> LlavaNextVisionTower:
    """The tower, uninitialised, with the names of its tensors in checkpoints."""
    newline = allocator.parameter("newline", config.width, sources=(Source("image_newline", config.width),))
    return LlavaNextVisionTower(config, build_llava_tower(config, allocator), newline)
