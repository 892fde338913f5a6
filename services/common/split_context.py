"""What `attention.split_context` does not do, by name.

`check_split_context` is called at start, before any weight is read. docs/several-gpus.md has the same in prose.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.common.attention.rope import length_dependent_beyond
from services.common.config import Config
from services.common.errors import ConfigError
from services.common.kv_cache.format import resolve_kv_cache_format
from services.common.resolve import ResolvedModel
from services.common.several_attention_workers import has_several


def check_split_context(config: Config, model: ResolvedModel, *, is_dense: bool) -> None:
    """Raises `ConfigError`, which names what is in the way and what to do. `is_dense`: it is the dense worker's config.
    """
    if not config.attention.split_context:
        return
    obstacles = list(_of_config(config))  # ranks first: they would refuse several attention workers, too
    if is_dense and not has_several(config):
        obstacles.append(("there is one attention worker", "set attention.workers to 2 or more, or leave it out"))
    obstacles += _of_model(config, model)
    for obstacle, mend in obstacles:
        raise ConfigError(f"attention.split_context is true, but {obstacle}: {mend}")


def _of_config(config: Config) -> Iterator[tuple[str, str]]:
    if config.dense.deterministic:
        yield "dense.deterministic is true, and parts are added up in another order", "leave one of both out"
    if config.dense.num_ranks > 1:
        yield f"there are {config.dense.num_ranks} ranks or stages", "leave one of both out"
    if config.scheduler.num_lanes > 1:
        yield f"scheduler.num_lanes is {config.scheduler.num_lanes}", "set it to 1"


def _of_model(config: Config, model: ResolvedModel) -> Iterator[tuple[str, str]]:
    shape, options, mend = model.config, model.config.attention, "leave it out for this model"
    kv_cache = resolve_kv_cache_format(config.attention, model)
    if kv_cache != "model":
        yield f"the KV cache is {kv_cache}", "set attention.kv_cache_dtype to model"
    if any(each is not None for each in shape.sliding_windows):
        yield f"{shape.family!r} has windows, or attention.window is set", mend
    if shape.encoder is not None or shape.recurrent_layers or options.value_dim is not None:
        yield f"{shape.family!r} has other attention than that of q, k and v heads in all layers", mend
    if options.layer_heads:
        yield f"the layers of {shape.family!r} have different heads", mend
    if options.has_sinks or options.relative_bias or options.alibi_slopes or options.softcap or options.sees_spans:
        yield f"{shape.family!r} has sinks, a bias, capped scores, or tokens that see later ones", mend
    ropes = {each for each in shape.layer_ropes if each is not None}
    if any(each.axes or length_dependent_beyond(each) is not None for each in ropes):
        yield f"positions of {shape.family!r} have axes, or depend on the length of the text", mend
    room, needed = 2 * shape.heads.kv_size * model.dtype.itemsize, 4 * shape.num_heads
    if room < needed:
        yield f"the log-sums of {shape.num_heads} heads take {needed} bytes, keys and values of a token {room}", mend
