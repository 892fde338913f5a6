"""Which models may have a host tier: the others refuse the setting, with its value and what is in the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from services.attn_worker.build import check_host_tier
from services.common.config import AttentionSection
from services.common.errors import ConfigError
from services.common.kv_cache.streaming import with_streaming
from services.common.model_config import ModelConfig
from services.common.resolve import ResolvedModel
from tests.support.model_configs import small_config

MAX_LEN, WINDOW = 256, 64


def check(config: ModelConfig, **section: Any) -> None:
    asked = AttentionSection(host_kv_bytes=2**20, **section)
    config = with_streaming(config, asked)
    check_host_tier(asked, ResolvedModel(config, torch.float32, torch.device("cpu"), MAX_LEN))


def with_windows(*windows: int | None) -> ModelConfig:
    return replace(small_config("llama"), num_layers=len(windows), sliding_windows=windows)


def test_models_that_keep_all_their_blocks_may() -> None:
    check(small_config("llama"))
    check(with_windows(WINDOW, None))
    check(with_windows(MAX_LEN, MAX_LEN))  # it hides nothing


def test_windows_in_all_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"host_kv_bytes is 1048576, .*64 tokens in all layers, of its own.* to 0"):
        check(with_windows(WINDOW, 16))


def test_streaming_llm_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"host_kv_bytes is 1048576, .*64 tokens in all layers, by attention\.window"):
        check(small_config("llama"), window=WINDOW, sink_tokens=4)


def test_recurrent_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"host_kv_bytes is 1048576, .*recurrent layers, whose states"):
        check(small_config("qwen3_next", num_hidden_layers=4))
