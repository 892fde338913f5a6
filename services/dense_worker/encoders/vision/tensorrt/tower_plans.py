"""The plans of a tower: found beside those of the text part, or built, before the weights are in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import structlog
import torch

from services.common.vision.vision_config import VisionConfig
from services.dense_worker.encoders.vision.load import Tower
from services.dense_worker.encoders.vision.operations import TowerOperations
from services.dense_worker.encoders.vision.tensorrt.tensorrt_operations import (
    TensorRTTowerOperations,
    weights_of_tower,
)
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
