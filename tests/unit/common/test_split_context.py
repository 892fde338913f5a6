"""What `attention.split_context` does not do is refused by name, with what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.common.config import EMBEDDED_MODEL, Config
from services.common.errors import ConfigError
from services.common.resolve import ResolvedModel, resolve_model
from services.common.split_context import check_split_context
from tests.support.dense.encoder_decoder_models import make_encoder_decoder
from tests.support.dense.family_models import make_family_model

REFUSED: list[tuple[dict[str, dict[str, Any]], str]] = [
    ({"attention": {"workers": 1}}, "there is one attention worker: set attention.workers to 2 or more"),
    ({"dense": {"deterministic": True}}, "dense.deterministic is true"),
    ({"dense": {"tensor_parallel_size": 2}}, "2 ranks or stages"),
    # Several attention workers are refused with these, so nobody is told to set them.
    ({"attention": {"workers": 1}, "dense": {"tensor_parallel_size": 2}}, "2 ranks or stages"),
    ({"attention": {"workers": 1}, "scheduler": {"num_lanes": 2}}, "scheduler.num_lanes is 2: set it to 1"),
    ({"scheduler": {"num_lanes": 2}}, "scheduler.num_lanes is 2: set it to 1"),
    ({"attention": {"kv_cache_dtype": "int8"}}, "the KV cache is int8: set attention.kv_cache_dtype to model"),
    ({"attention": {"window": 32, "sink_tokens": 4}}, "attention.window is set"),
]
FAMILIES = {
    "gemma2": "has windows",
    "deepseek_v3": "has other attention than that of q, k and v heads",
    "qwen3_next": "has other attention than that of q, k and v heads",
    "t5": "has other attention than that of q, k and v heads",
    "gpt_oss": "has windows",
    "mpt": "has sinks, a bias, capped scores",
}


def resolved(sections: dict[str, dict[str, Any]], path: Path = EMBEDDED_MODEL) -> tuple[Config, ResolvedModel]:
    attention = {"split_context": True, "workers": 2, **sections.get("attention", {})}
    config = Config.model_validate({**sections, "model": {"path": str(path)}, "attention": attention})
    return config, resolve_model(config.model, "cpu", config.attention)


def test_a_plain_model_on_cpus_can_be_split() -> None:
    config, model = resolved({})
    check_split_context(config, model, is_dense=True)
    check_split_context(*resolved({"attention": {"workers": 1}}), is_dense=False)  # an attention worker knows itself


@pytest.mark.parametrize(("sections", "words"), REFUSED)
def test_a_setting_that_is_in_the_way_is_named(sections: dict[str, dict[str, Any]], words: str) -> None:
    config, model = resolved(sections)
    with pytest.raises(ConfigError, match=r"^attention.split_context is true, but .*") as refused:
        check_split_context(config, model, is_dense=True)
    assert words in str(refused.value)


@pytest.mark.parametrize("variant", FAMILIES)
def test_a_model_with_other_attention_is_named(tmp_path: Path, variant: str) -> None:
    (make_encoder_decoder if variant == "t5" else make_family_model)(tmp_path, variant)
    with pytest.raises(ConfigError, match=FAMILIES[variant]):
        check_split_context(*resolved({}, tmp_path), is_dense=True)


def test_heads_without_room_for_log_sums_are_named() -> None:
    config, model = resolved({})
    shape = replace(model.config, num_heads=256, num_kv_heads=1, head_dim=8)
    with pytest.raises(ConfigError, match="the log-sums of 256 heads take 1024 bytes, keys and values of a token 64"):
        check_split_context(config, replace(model, config=shape), is_dense=False)
