"""`dense.engine_weights`: whether weights are inputs or constants of the plans; `auto` takes what is measured faster.

Constants let TensorRT lay weights out as it likes, but are a second copy of them on the GPU, take longer to build and
to load, and their plans are as large as the weights of a segment.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import structlog

from services.common.model_config import ModelConfig
from services.dense_worker.tensorrt.backend import Measurements
from services.dense_worker.tensorrt.engine_plan_cache import EnginePlans

log = structlog.get_logger()

EngineWeights = Literal["inputs", "constants", "auto"]

MIN_GAIN = 0.03  # fraction of the time that constants must save to be worth their memory
MAX_SIZE = 256  # tokens; decode steps, where reading the weights takes the time


def weights_setting(setting: EngineWeights, config: ModelConfig) -> EngineWeights:
    """The setting for a model: `auto` has no choice for quantized weights, which are always inputs."""
    return "inputs" if setting == "auto" and config.quantization is not None else setting


def choose_plans(
    setting: EngineWeights,
    find: Callable[[bool], EnginePlans],
    measured: Callable[[EnginePlans], Measurements | None],
) -> EnginePlans:
    """The plans to run. `find` returns those with constants (True) or inputs, `measured` their times if there are any.

    Without times `auto` takes inputs, and the log says so.
    """
    if setting != "auto":
        return find(setting == "constants")
    inputs, constants = find(False), find(True)
    by_inputs, by_constants = measured(inputs), measured(constants)
    if by_inputs is None or by_constants is None:
        log.warning("weights are inputs of the plans", reason="the plans were not measured, and dense.build is 'never'")
        return inputs
    ratio = time_ratio(by_constants, by_inputs)
    are_constants = ratio < 1 - MIN_GAIN
    log.info(
        "engine weights chosen",
        weights="constants" if are_constants else "inputs",
        time_ratio=round(ratio, 3),  # of constants to inputs
        plan_bytes=sum(cached.record.plan_bytes for plans in constants.values() for cached in plans),  # with constants
    )
    return constants if are_constants else inputs


def time_ratio(these: Measurements, those: Measurements) -> float:
    """The geometric mean of TensorRT's times relative to `those`, for up to MAX_SIZE tokens of the repeated segment."""
    segment = "middle" if "middle" in those else "last"
    ratios = [
        us["tensorrt"] / those[segment][size]["tensorrt"]
        for size, us in these[segment].items()
        if size <= MAX_SIZE and size in those[segment]
    ]
    return math.prod(ratios) ** (1 / len(ratios))
