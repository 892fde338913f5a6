"""attention.window and attention.sink_tokens: what is refused at start, and the length that they allow."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from services.attn_worker.layers.select import select_backend
from services.common.config import AttentionSection, ModelSection, load_config
from services.common.errors import ConfigError
from services.common.resolve import resolve_model
from tests.support.model_configs import write_config

SECTION = AttentionSection(window=32, sink_tokens=4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["attention.window=64"], "attention.window 64 and attention.sink_tokens 0 belong together"),
        (["attention.sink_tokens=4"], "attention.window None and attention.sink_tokens 4 belong together"),
        (["attention.window=64", "attention.sink_tokens=-1"], "attention.sink_tokens = -1"),
        (["attention.window=0", "attention.sink_tokens=4"], "attention.window = 0"),
        (["attention.window=15", "attention.sink_tokens=4"], "attention.window is 15, less than a block of 16 tokens"),
        (["attention.window=32", "attention.sink_tokens=33"], "sink_tokens is 33, more than attention.window 32"),
    ],
    ids=str,
)
def test_impossible_numbers_are_refused_with_the_config(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        load_config(None, settings)


@pytest.mark.parametrize(
    ("family", "fields", "obstacle"),
    [
        ("mistral", {"sliding_window": 64}, "windows of its own"),
        ("bloom", {"n_layer": 2, "n_head": 4}, "ALiBi"),
        ("gpt2", {"n_layer": 2, "n_head": 4, "n_embd": 64}, "learned positions"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "on the length"),
        ("llama", {"max_position_embeddings": 35}, "trained with 35 tokens, fewer than these together"),
    ],
    ids=str,
)
def test_models_that_cannot_be_run_so_are_refused_by_name(
    tmp_path: Path, family: str, fields: dict[str, Any], obstacle: str
) -> None:
    path = write_config(tmp_path, family, **fields)
    with pytest.raises(ConfigError, match=f"attention.window is 32 and attention.sink_tokens 4, but .*{obstacle}"):
        resolve_model(ModelSection(path=path), "cpu", SECTION)


def test_a_model_may_get_longer_than_it_was_trained_for(tmp_path: Path) -> None:
    section = ModelSection(path=write_config(tmp_path, "llama", max_position_embeddings=36), max_model_len=100_000)
    with pytest.raises(ConfigError, match="positions end at 36"):
        resolve_model(section, "cpu")
    model = resolve_model(section, "cpu", SECTION)
    assert model.max_model_len == 100_000
    assert model.config.sliding_windows == (32, 32, 32) and model.config.attention.num_sink_tokens == 4


def test_workers_with_different_windows_are_told_apart(tmp_path: Path) -> None:
    section = ModelSection(path=write_config(tmp_path, "llama"))
    sections = [AttentionSection(), SECTION, AttentionSection(window=33, sink_tokens=4)]
    fingerprints = {resolve_model(section, "cpu", each).config.fingerprint for each in sections}
    assert len(fingerprints) == 3


def test_kernels_without_sinks_are_refused_by_name(tmp_path: Path) -> None:
    model = resolve_model(ModelSection(path=write_config(tmp_path, "llama")), "cpu", SECTION)
    on_gpu = dataclasses.replace(model, device=torch.device("cuda"))
    attention = dataclasses.replace(model.config.attention, value_dim=16)
    latent = dataclasses.replace(on_gpu, config=dataclasses.replace(model.config, attention=attention))
    with pytest.raises(ConfigError, match=r"latent attention, .* lack attention\.sink_tokens"):
        select_backend(SECTION, latent)
    assert select_backend(SECTION, on_gpu) == "triton"
    assert select_backend(SECTION, model) == "torch"
