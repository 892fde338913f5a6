"""The tower of Gemma 3: SigLIP's, whose rows are averaged in squares, normalised, and multiplied by a matrix."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional as F

from services.common.families.shape import NormKind
from services.common.vision.gemma3 import Gemma3Tower
from services.common.vision.vision_config import PixelScale
from services.dense_worker.encoders.vision.layer import PROJECTOR
from services.dense_worker.encoders.vision.operations import RowPart, TowerOperations
from services.dense_worker.encoders.vision.patch_tower import PatchEncoder, build_patch_encoder
from services.dense_worker.encoders.vision.picture import Picture
from services.dense_worker.kernels.linear.quantized.layer import FLOATS
from services.dense_worker.kernels.norm.norm import Norm
from services.dense_worker.model.allocator import WeightAllocator
from services.dense_worker.parameters import Conversion, Loaded, Parameter, Source, StoredTensor


@dataclass(frozen=True, slots=True)
class SoftProjection(RowPart):
    """The norm and the matrix behind the averages."""

    norm: Norm
    matrix: Parameter  # [width, hidden]
    segment: ClassVar[str] = "project"

    @property
    def row_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"x": (self.matrix.data.shape[1],)}

    def forward(self, operations: TowerOperations, x: torch.Tensor) -> torch.Tensor:
        """x [n, hidden] -> [n, width]"""
        return F.linear(self.norm.normalize(x), self.matrix.data)


@dataclass(frozen=True, slots=True)
class Gemma3VisionTower:
    """Each picture is one tile."""

    config: Gemma3Tower
    encoder: PatchEncoder
    projection: SoftProjection

    def parts(
        self, pictures: Sequence[Picture], pixels: PixelScale, operations: TowerOperations
    ) -> Generator[None, None, list[torch.Tensor]]:
        """Rows [num_tokens, width] of each picture."""
        rows = yield from self.encoder.parts(pictures, pixels, operations)
        size = self.config.patches.num_columns // self.config.num_columns
        squares = rows.unflatten(1, (self.config.num_columns, size, self.config.num_columns, size))
        averages = squares.mean(dim=(2, 4)).flatten(0, 2)
        return list(operations.run(self.projection, averages).unflatten(0, (len(rows), -1)))


def build_gemma3_tower(config: Gemma3Tower, allocator: WeightAllocator) -> Gemma3VisionTower:
    """The tower, uninitialised, with the names of its tensors in checkpoints."""
    hidden, eps = config.patches.hidden_size, config.patches.norm_eps
    encoder = build_patch_encoder(config.patches, allocator)
    norm = allocator.norm("soft_norm", f"{PROJECTOR}.mm_soft_emb_norm", hidden, eps, NormKind.RMS_PLUS_ONE)
    name = f"{PROJECTOR}.mm_input_projection_weight"
    stored = StoredTensor((name,), FLOATS, ((hidden, config.width),))

    def transpose(given: Loaded) -> torch.Tensor:
        return given.tensor.t()

    source = Source(name, config.width, Conversion((stored,), transpose))
    matrix = allocator.parameter("projection", config.width, hidden, sources=(source,))
    return Gemma3VisionTower(config, encoder, SoftProjection(norm, matrix))
