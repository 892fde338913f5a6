"""The towers of LLaVA models: CLIP's, and two matrices that make rows of the prompt of what one of its layers gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.common.vision.llava import LlavaTower
from services.common.vision.vision_config import PixelScale
from services.dense_worker.encoders.vision.layer import ACTIVATIONS, multiply
from services.dense_worker.encoders.vision.patch_tower import PatchEncoder, build_patch_encoder
from services.dense_worker.encoders.vision.picture import Picture
from services.dense_worker.kernels.linear.linear import Cut, Linear, Projection
from services.dense_worker.model.allocator import WeightAllocator

_NAME = "multi_modal_projector"


@dataclass(frozen=True, slots=True)
class LlavaVisionTower:
    """LLaVA 1.5: each picture is one tile."""

    config: LlavaTower
    encoder: PatchEncoder
    first: Linear
    second: Linear

    def forward(self, pictures: Sequence[Picture], pixels: PixelScale) -> list[torch.Tensor]:
        """Rows [num_tokens, width] of each picture."""
        return list(self.tiles(pictures, pixels))

    def tiles(self, pictures: Sequence[Picture], pixels: PixelScale) -> torch.Tensor:
        """Rows [rows_of_tile, width] of each tile of all pictures."""
        rows = self.encoder.forward(pictures, pixels)
        if not self.config.keeps_class_token:
            rows = rows[:, 1:]
        return multiply(self.second, ACTIVATIONS[self.config.activation](multiply(self.first, rows)))


def build_llava_tower(config: LlavaTower, allocator: WeightAllocator) -> LlavaVisionTower:
    """The tower, uninitialised, with the names of its tensors in checkpoints."""
    hidden, width, bias = config.patches.hidden_size, config.width, config.has_bias
    return LlavaVisionTower(
        config,
        build_patch_encoder(config.patches, allocator),
        allocator.linear("first", hidden, (Projection(f"{_NAME}.linear_1", width),), Cut.OUT, bias),
        allocator.linear("second", width, (Projection(f"{_NAME}.linear_2", width),), Cut.OUT, bias),
    )
