"""`dense.quantization`: the quantization of a checkpoint, or one that is made of it while it loads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from services.common.errors import ConfigError
from services.common.model_config import ModelConfig
from services.common.quantization.schemes import on_the_fly_fp8

Setting = Literal["checkpoint", "fp8"]


def with_quantization(config: ModelConfig, setting: Setting, path: Path) -> ModelConfig:
    """The config as the dense worker loads it. Raises ConfigError if the checkpoint `path` is quantized already."""
    if setting == "checkpoint":
        return config
    if config.quantization is not None:
        raise ConfigError(
            f"dense.quantization is {setting!r}, but the checkpoint {path} is quantized already "
            f"({config.quantization.method})"
        )
    return replace(config, quantization=on_the_fly_fp8())
