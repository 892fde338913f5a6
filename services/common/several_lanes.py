"""What does not run with several lanes, by name.

`check_lanes` is called at start, before any weight is read. docs/several-gpus.md has the same table in prose.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from services.common.config import Config
from services.common.errors import ConfigError
from services.common.families.shape import ModelConfig
from services.common.several_attention_workers import has_several

_NUM_STROKES = 2


def check_lanes(config: Config, model: ModelConfig) -> None:
    """Raises `ConfigError`, which names what is in the way and what to do, if several lanes cannot run this."""
    check_lanes_config(config)
    _check_none(config, _of_model(model))


def check_lanes_config(config: Config) -> None:
    """The part of `check_lanes` that needs no model: for a launcher, before it starts anything."""
    _check_none(config, _of_config(config))


def _check_none(config: Config, obstacles: Iterable[tuple[str, str]]) -> None:
    if config.scheduler.num_lanes > 1:
        for obstacle, mend in obstacles:
            raise ConfigError(f"scheduler.num_lanes is {config.scheduler.num_lanes}, but {obstacle}: {mend}")


def _of_config(config: Config) -> Iterator[tuple[str, str]]:
    """Settings that are in the way, with what to do."""
    dense, attention, scheduler = config.dense, config.attention, config.scheduler
    if scheduler.max_num_seqs < scheduler.num_lanes:
        yield f"scheduler.max_num_seqs is {scheduler.max_num_seqs}", "each lane needs a sequence"
    if (most := max(_NUM_STROKES, dense.pipeline_parallel_size)) < scheduler.num_lanes:
        what = "two strokes of a step" if most == _NUM_STROKES else f"{most} stages"
        yield f"there are {what}, of which each runs one lane at a time", f"set it to {most} or less"
    if dense.tensor_parallel_size > 1:
        yield f"there are {dense.tensor_parallel_size} ranks, whose sums have one order", "set one of both to 1"
    if has_several(config):
        yield "there may be several attention workers, whose rows cross the seam together", "leave one of both out"
    if dense.backend == "tensorrt":
        yield "TensorRT has buffers for one step", "set dense.backend to torch"
    if dense.max_loras:
        yield f"dense.max_loras is {dense.max_loras}, and adapters are chosen for one step", "set it to 0"
    if scheduler.speculation != "off":
        yield f"scheduler.speculation is {scheduler.speculation!r}, which waits for each step", "set it to off"
    if scheduler.policy == "take_turns":
        yield "scheduler.policy is take_turns, whose copies are of one stream", "choose another one"
    if attention.host_kv_bytes:
        yield f"attention.host_kv_bytes is {attention.host_kv_bytes}, and copies are of one stream", "set it to 0"


def _of_model(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Parts of a model whose state belongs to no single step."""
    if model.encoder is not None:
        yield f"{model.family!r} has an encoder, whose output crosses the seam before a step", "set it to 1"
    if model.recurrent_layers:
        yield f"{model.family!r} has recurrent layers, whose states later steps take over", "set it to 1"
