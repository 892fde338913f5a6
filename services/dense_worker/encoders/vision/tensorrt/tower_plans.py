"""The plans of a tower: found beside those of the text part, or built, before the weights are in memory.

`TensorRTTowerOperations`: the parts of a tower by TensorRT, what lies between them as without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import structlog
import torch

from services.common.vision.vision_config import PixelScale, VisionConfig
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
from services.dense_worker.tensorrt.api import TensorRT
from services.dense_worker.tensorrt.engine_plan_cache import EnginePlans
from services.dense_worker.tensorrt.engine_segments import PlanRuns
from services.dense_worker.tensorrt.files.network_record import NetworkRecord
from services.dense_worker.tensorrt.gpu import current_stream, synchronize
from services.dense_worker.tensorrt.prepare import TensorRTPlans
from services.dense_worker.tensorrt.profiles import parse_profiles

log = structlog.get_logger()

# Of rows of a part. A picture of the usual sizes has hundreds to thousands; more rows run in several calls.
PROFILES = parse_profiles("1-1024@1024,1025-8192@8192")


@dataclass(frozen=True, slots=True)
class TowerPlans:
    """A TensorRT, and its plans of a tower."""

    api: TensorRT
    plans: EnginePlans

    def operations(self, tower: Tower, others: TowerOperations, device: torch.device) -> TensorRTTowerOperations:
        """Those of a tower with its weights. `others`: what TensorRT does not run. Waits for the device."""
        max_sizes = dict.fromkeys(self.plans, PROFILES[-1].high)
        runs = PlanRuns(self.api, self.plans, weights_of_tower(tower), device, max_sizes, current_stream)
        synchronize()  # contexts are set up on this thread's stream, and will run on the tower's
        log.info("the tower is run by TensorRT", version=self.api.name, segments=len(self.plans))
        return TensorRTTowerOperations(runs, tower, others)


def find_or_build_tower(
    found: TensorRTPlans,
    vision: VisionConfig,
    dtype: torch.dtype,
    build_command: str | None,
    report: Callable[[str], None],
) -> TowerPlans:
    """The plans, in the directory of those that were `found`. Raises what `EnginePlanBuilder.find_or_build` raises."""
    from services.dense_worker.encoders.vision.tensorrt.tower_networks import export_tower  # needs onnx
    from services.dense_worker.tensorrt.engine_plan_builder import EnginePlanBuilder

    builder = EnginePlanBuilder(found.api, found.gpu, PROFILES, found.cache)
    record, export = NetworkRecord(found.cache.directory, vision, dtype), partial(export_tower, vision, dtype)
    plans = builder.find_recorded_or_build(record, export, dtype, build_command, report)
    return TowerPlans(found.api, plans)


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
