"""What does not run on several ranks, by name, and which numbers of ranks a model can be dealt to.

`check_ranks` is called at start, before any weight is read. docs/several-gpus.md has the same table in prose.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from services.common.config import SERVICES, Config
from services.common.errors import ConfigError
from services.common.families.shape import ModelConfig, SelectiveScan
from services.common.rank import Rank

MOST_RANKS = 64
TENSOR, PIPELINE = "dense.tensor_parallel_size", "dense.pipeline_parallel_size"


def check_ranks(config: Config, model: ModelConfig) -> None:
    """Raises `ConfigError`, which names what is in the way and what to do, if several ranks cannot run this."""
    num_parts, num_stages = config.dense.tensor_parallel_size, config.dense.pipeline_parallel_size
    if num_parts == num_stages == 1:
        return
    check_ranks_config(config)
    _check_none(config, _of_layers(model) if num_stages > 1 else _of_parts(model))
    check_divisible(model, num_parts)
    check_stages(model, num_stages)


def check_ranks_config(config: Config) -> None:
    """The part of `check_ranks` that needs no model: for a launcher, before it starts anything for several ranks."""
    num_parts, num_stages = config.dense.tensor_parallel_size, config.dense.pipeline_parallel_size
    if num_parts > 1 and num_stages > 1:
        raise ConfigError(f"{TENSOR} is {num_parts} and {PIPELINE} {num_stages}: set one of them to 1")
    _check_none(config, _of_config(config))


def _check_none(config: Config, obstacles: Iterable[tuple[str, str]]) -> None:
    setting = PIPELINE if config.dense.pipeline_parallel_size > 1 else TENSOR
    for obstacle, mend in obstacles:
        raise ConfigError(f"{setting} is {config.dense.num_ranks}, but {obstacle}: {mend}")


def check_divisible(model: ModelConfig, count: int) -> None:
    """Raises `ConfigError`, which names the numbers of ranks that would do, if the model cannot be dealt to `count`."""
    if obstacle := _undivided(model, count):
        fitting = [str(each) for each in range(1, MOST_RANKS + 1) if not _undivided(model, each)]
        raise ConfigError(f"{TENSOR} is {count}, but {model.family!r} has {obstacle}: set it to {' or '.join(fitting)}")


def check_stages(model: ModelConfig, count: int) -> None:
    """Raises `ConfigError`, which names the numbers that would do, if the layers cannot be dealt to `count` stages."""
    if obstacle := _unstaged(model, count):
        fitting = [str(each) for each in range(1, MOST_RANKS + 1) if not _unstaged(model, each)]
        raise ConfigError(
            f"{PIPELINE} is {count}, but {model.family!r} has {obstacle}: set it to {' or '.join(fitting)}"
        )


def _of_config(config: Config) -> Iterator[tuple[str, str]]:
    """Settings that are in the way, with what to do."""
    dense, scheduler, launch = config.dense, config.scheduler, config.launch
    if dense.backend == "tensorrt":
        yield "TensorRT has neither sums over ranks nor stages", "set dense.backend to torch"
    if dense.deterministic:
        yield "dense.deterministic is true, and ranks have other kernels", "set it to false"
    if dense.pipeline_parallel_size > 1 and scheduler.speculation in ("medusa", "eagle3"):
        yield f"scheduler.speculation is {scheduler.speculation!r}, whose heads read other stages", "set it to off"
    if set(launch.services) != set(SERVICES):
        yield f"launch.services is {', '.join(launch.services)}", "one launcher must start all services"
    if launch.standby_dense == "imports":
        yield "launch.standby_dense is 'imports', and a shard's standby has its weights", "set it to auto or loaded"


def _of_parts(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Parts of a model that cannot be cut."""
    parts, family, alone = model.parts, repr(model.family), f"set it to 1, or {PIPELINE} instead"
    if model.recurrent_layers or parts.has_attention_gate:
        yield f"{family} has gated attention or recurrent layers, which are not cut", alone
    if parts.embedding_size is not None:
        yield f"{family} has projections beside its embedding, which are not cut", alone
    if model.encoder is not None:
        yield f"{family} has an encoder and cross attention, which are not cut", "set it to 1"
    if parts.layer_inputs is not None:
        yield f"{family} has inputs of its own for each layer, which are not cut", "set it to 1"


def _of_layers(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Parts of a model that several stages would have to share."""
    if model.encoder is not None:
        yield f"{model.family!r} has an encoder, whose output all stages would need", "set it to 1"
    if model.parts.layer_inputs is not None:
        yield f"{model.family!r} has inputs for each layer, which the first stage alone could make", "set it to 1"


def _undivided(model: ModelConfig, count: int) -> str:
    """Which number of the model cannot be dealt to so many ranks; empty: all can."""
    parts, experts = model.parts, model.parts.experts
    counts = [(heads.num_heads, "heads") for heads in model.layer_heads]
    counts += [(size, "intermediate rows") for size in parts.layer_intermediate_sizes or (model.intermediate_size,)]
    if experts is not None:
        counts.append((experts.intermediate_size, "intermediate rows of an expert"))
        counts.append((experts.shared_intermediate_size or 0, "intermediate rows of the shared expert"))
    for number, what in counts:
        if number % count:
            return f"{number} {what}"
    for heads in model.layer_heads:
        if heads.num_kv_heads % count and count % heads.num_kv_heads:
            return f"{heads.num_kv_heads} key-value heads"
    return ""


def _unstaged(model: ModelConfig, count: int) -> str:
    """What of the model's layers cannot be dealt to so many stages; empty: all can."""
    if count > model.num_layers:
        return f"{model.num_layers} layers"
    windows, heads = model.sliding_windows, model.layer_heads
    has_full = None in windows
    for index in range(count):
        layers = Rank(index, count, is_stage=True).layers(model.num_layers)
        name = f"stage {index}, layers {layers.start} to {layers.stop - 1},"
        if all(heads[each].recurrence is not None for each in layers):
            return f"no layer with keys and values in {name} and a KV cache needs one"
        if has_full and all(windows[each] is not None for each in layers):
            return f"no layer without a window in {name} and all stages must keep the same blocks"
        if isinstance(heads[layers.start].recurrence, SelectiveScan):
            return f"a layer that begins in the stage before {name} with its convolution"
        for layer in layers:
            if (source := heads[layer].kv_layer) is not None and source not in layers:
                return f"keys in layer {source} that layer {layer} reads, which is in another stage"
    return ""
