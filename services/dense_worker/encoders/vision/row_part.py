"""`RowPart`: a part of a tower with weights that computes each row by itself: what ONNX and TensorRT get of a tower.

A tower is made of such parts, and of what lies between them and has no weights, or adds tables: attention, rotation,
positions. `TowerOperations.run` runs a part: by torch, or by what was exported of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from services.dense_worker.parameters import parts_of_type

if TYPE_CHECKING:
    from services.dense_worker.encoders.vision.load import Tower
    from services.dense_worker.encoders.vision.operations import TowerOperations

PREFIX = "tower_"  # of the names of its segments, where the others of the model have theirs
OUTPUT = "rows_out"  # of every segment


class RowPart:
    """A frozen dataclass of parameters. Parts of a tower that have one `segment` have equal shapes."""

    __slots__ = ()
    segment: ClassVar[str]

    @property
    def row_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of a row of each input, by its name."""
        raise NotImplementedError

    def forward(self, operations: TowerOperations, *inputs: torch.Tensor) -> torch.Tensor:
        """inputs: [n, *row shape], which may be overwritten -> [n, width]"""
        raise NotImplementedError


def segments_of_tower(tower: Tower) -> dict[str, list[RowPart]]:
    """The parts of each segment, by name with `PREFIX`, in their order."""
    found: dict[str, list[RowPart]] = {}
    for part in parts_of_type(RowPart, tower):
        found.setdefault(PREFIX + part.segment, []).append(part)
    return found
