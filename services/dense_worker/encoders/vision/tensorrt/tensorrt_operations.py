"""`TensorRTTowerOperations`: the parts of a tower by TensorRT, what lies between them as without it."""

from __future__ import annotations

import torch

from services.common.vision.vision_config import PixelScale
from services.dense_worker.encoders.packed_attention import PackedSequences
from services.dense_worker.encoders.vision.load import Tower
from services.dense_worker.encoders.vision.operations import (
    OUTPUT,
    Rotation,
    RowPart,
    TowerOperations,
    segments_of_tower,
)
from services.dense_worker.encoders.vision.picture import Picture
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.kernels.norm.norm import Norm
from services.dense_worker.parameters import tensors_by_name
from services.dense_worker.tensorrt.engine_segments import PlanRuns


class TensorRTTowerOperations:
    """For one tower, on the current stream. Parts with more rows than the plans have run in several calls."""

    def __init__(self, runs: PlanRuns, tower: Tower, others: TowerOperations) -> None:
        """runs: of the tower's segments, each layer of which is a part; others: what TensorRT does not run."""
        self._runs, self._others, self._max_rows = runs, others, runs.profiles[-1].high
        self._places = {
            id(part): (name, index)
            for name, parts in segments_of_tower(tower).items()
            for index, part in enumerate(parts)
        }
        self._widths = {name: runs.output_shape(name, OUTPUT)[1] for name, _ in self._places.values()}

    def run(self, part: RowPart, *inputs: torch.Tensor) -> torch.Tensor:
        """A new tensor. `part` is one of the tower's own."""
        segment, index = self._places[id(part)]
        num_rows = len(inputs[0])
        out = inputs[0].new_empty(num_rows, self._widths[segment])
        for start in range(0, num_rows, self._max_rows):
            some = slice(start, start + self._max_rows)
            named = [(name, each[some].contiguous()) for name, each in zip(part.row_shapes, inputs, strict=True)]
            self._runs.run(segment, index, len(named[0][1]), named, [(OUTPUT, out[some])])
        return out

    def read_pixels(
        self, picture: Picture, scale: PixelScale, device: torch.device, dtype: torch.dtype
    ) -> torch.Tensor:
        return self._others.read_pixels(picture, scale, device, dtype)

    def multiply(
        self,
        linear: Linear,
        x: torch.Tensor,
        *,
        norm: Norm | None = None,
        activation: MlpActivation | None = None,
    ) -> torch.Tensor:
        return self._others.multiply(linear, x, norm=norm, activation=activation)

    def add_multiply(
        self, linear: Linear, x: torch.Tensor, delta: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._others.add_multiply(linear, x, delta, norm)

    def attend(self, heads: torch.Tensor, sequences: PackedSequences, rotation: Rotation | None) -> torch.Tensor:
        return self._others.attend(heads, sequences, rotation)


def weights_of_tower(tower: Tower) -> dict[str, list[dict[str, torch.Tensor]]]:
    """The weights of each part, by input name, as `bind_weights` has those of the text part."""
    return {name: [*map(tensors_by_name, parts)] for name, parts in segments_of_tower(tower).items()}
