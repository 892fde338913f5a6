"""What does not run with several attention workers for one dense worker, by name.

`check_attention_workers` is called at start, before any weight is read. docs/several-gpus.md has the same in prose.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.common.config import Config
from services.common.errors import ConfigError
from services.common.families.shape import ModelConfig


def has_several(config: Config) -> bool:
    """Whether there are several attention workers, or may be."""
    return config.attention.workers > 1 or config.attention.elastic or bool(config.attention.addresses)


def device_of_worker(config: Config, index: int) -> str:
    """The device of an attention worker that the launcher starts, or adds later."""
    attention = config.attention
    return attention.devices[index % len(attention.devices)] if attention.devices else attention.device


def devices_of_workers(config: Config) -> list[str]:
    """The device of each attention worker with which the launcher starts."""
    return [device_of_worker(config, index) for index in range(config.attention.workers)]


def check_attention_workers(config: Config, model: ModelConfig | None = None) -> None:
    """Raises `ConfigError`, which names what is in the way and what to do, if several cannot serve this.

    `model`: where it is known
    """
    if config.attention.devices:
        _check_devices(config)
    if has_several(config):
        attention = config.attention
        names = f"attention.workers is {attention.workers}"
        if attention.elastic:
            names += " and attention.elastic is true"
        if attention.addresses and attention.workers == 1 and not attention.elastic:
            names = f"attention.addresses names {len(attention.addresses)}"
        for obstacle, mend in (*_obstacles(config), *(() if model is None else _of_model(model))):
            raise ConfigError(f"{names}, but {obstacle}: {mend}")


def _check_devices(config: Config) -> None:
    attention, names = config.attention, ", ".join(config.attention.devices)
    if attention.device != "auto":
        raise ConfigError(f"attention.devices is {names}, and attention.device {attention.device!r}: leave one out")
    least = max(2, len(attention.devices))
    if attention.workers < least and not attention.elastic:
        raise ConfigError(
            f"attention.devices is {names}, and attention.workers {attention.workers}: set it to {least} or more, or"
            " attention.elastic to true"
        )


def _of_model(model: ModelConfig) -> Iterator[tuple[str, str]]:
    if model.encoder is not None:
        yield f"{model.family!r} has an encoder, whose output crosses one seam", "set attention.workers to 1"


def _obstacles(config: Config) -> Iterator[tuple[str, str]]:
    """Settings that are in the way, with what to do."""
    dense, attention, launch = config.dense, config.attention, config.launch
    if len(set(attention.addresses)) < len(attention.addresses):
        yield "two of them are the same", "name each attention worker once"
    for key in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (number := getattr(dense, key)) > 1:
            yield f"dense.{key} is {number}", "ranks have one attention worker each"
    if attention.kv_events is not None:
        yield f"attention.kv_events is {attention.kv_events!r}, and the events are of one cache", "leave it out"
    if (attention.workers > 1 or attention.elastic) and not {"attn_worker", "dense_worker"}.issubset(launch.services):
        yield (
            f"launch.services is {', '.join(launch.services)}",
            "one launcher must start the dense worker and the attention workers, of which an encoder has none; or start"
            " attention workers elsewhere, and name them in attention.addresses of the dense worker's config",
        )
    if launch.standby_attention not in ("auto", "off"):
        yield f"launch.standby_attention is {launch.standby_attention!r}", "set it to off: the others take over"
