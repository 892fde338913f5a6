"""A tower whose parts are run as TensorRT gets them, by the stand-in that runs plans with onnxruntime on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from services.dense_worker.encoders.vision.load import Tower
from services.dense_worker.encoders.vision.operations import TorchTowerOperations
from services.dense_worker.encoders.vision.tensorrt.tower_plans import (
    TensorRTTowerOperations,
    weights_of_tower,
)
from services.dense_worker.tensorrt.api import TensorRT
from services.dense_worker.tensorrt.engine_plan_builder import EnginePlanBuilder
from services.dense_worker.tensorrt.engine_plan_cache import EnginePlanCache
from services.dense_worker.tensorrt.engine_segments import PlanRuns
from services.dense_worker.tensorrt.gpu import Gpu
from services.dense_worker.tensorrt.profiles import parse_profiles
from tests.support.workers.fake_tensorrt import FakeTensorRT

STREAM = 7


def planned_operations(
    trt: FakeTensorRT, networks: Mapping[str, bytes], tower: Tower, directory: Path, profiles: str = "1-4,5-16"
) -> TensorRTTowerOperations:
    """By plans of a tower's networks, in float32. Parts of the tests' pictures have more rows than these profiles."""
    api, parsed = TensorRT(trt), parse_profiles(profiles)
    builder = EnginePlanBuilder(api, Gpu("GPU A", (12, 0), 100), parsed, EnginePlanCache(directory))
    plans = builder.find_or_build(networks, torch.float32, None, lambda line: None)
    max_sizes = dict.fromkeys(plans, parsed[-1].high)
    runs = PlanRuns(api, plans, weights_of_tower(tower), torch.device("cpu"), max_sizes, lambda: STREAM)
    return TensorRTTowerOperations(runs, tower, TorchTowerOperations())
