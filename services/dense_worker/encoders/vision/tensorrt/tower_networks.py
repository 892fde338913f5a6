"""The segments of a tower as ONNX graphs, whose weights are inputs: one graph serves all parts of a segment.

What lies between the parts stays with torch: attention, rotation, positions, class tokens, and the norms before the
first layer and after the last.
"""

from __future__ import annotations

import onnx
import torch

from services.common.errors import ConfigError
from services.common.vision.vision_config import VisionConfig
from services.dense_worker.encoders.vision.load import BUILDERS
from services.dense_worker.encoders.vision.operations import OUTPUT, TorchTowerOperations, segments_of_tower
from services.dense_worker.model.allocator import WeightAllocator
from services.dense_worker.tensorrt.onnx_segments import Example, export_example

_META = torch.device("meta")
_NUM_ROWS = 7  # any number except 0 and 1, which torch.export would treat as constants
_NOT_EXPORTED = ("blip-2",)


class TowerNetworks:
    """The graphs of one tower. Making them takes no memory for weights."""

    def __init__(self, vision: VisionConfig, dtype: torch.dtype) -> None:
        """Raises ConfigError for a family whose tower is not exported."""
        if vision.family in _NOT_EXPORTED:
            raise ConfigError(
                f"the tower of {vision.family!r} is not exported to ONNX: its queries read pictures by cross attention"
            )
        self._family, self._dtype = vision.family, dtype
        tower = BUILDERS[vision.family](vision.tower, WeightAllocator(dtype, _META))
        self._parts = {name: parts[0] for name, parts in segments_of_tower(tower).items()}

    @property
    def names(self) -> tuple[str, ...]:
        """Of all segments."""
        return tuple(self._parts)

    def export(self, name: str) -> onnx.ModelProto:
        """The checked graph of a segment. The same arguments give the same bytes."""
        part = self._parts[name]
        inputs = {
            each: ("num_rows", torch.empty(_NUM_ROWS, *shape, dtype=self._dtype, device=_META))
            for each, shape in part.row_shapes.items()
        }
        example = Example(part, inputs, (OUTPUT,), "num_rows")
        return export_example(f"{self._family}_{name}", example, TorchTowerOperations(), self._dtype)


def export_tower(vision: VisionConfig, dtype: torch.dtype) -> dict[str, bytes]:
    """All segments, serialized, by name. Raises ConfigError for a family whose tower is not exported."""
    networks = TowerNetworks(vision, dtype)
    return {name: networks.export(name).SerializeToString(deterministic=True) for name in networks.names}
