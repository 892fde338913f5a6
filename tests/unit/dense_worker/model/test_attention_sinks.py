"""Learned sinks in a checkpoint: what is wrong with them, and the hash of the weights."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from services.common.errors import ModelError
from services.common.families import names
from services.common.model_config import AttentionOptions, ModelConfig, load_model_config
from services.dense_worker.model.checkpoint import open_checkpoint
from services.dense_worker.model.learned import Rows, random_sinks, read_sinks
from services.dense_worker.model.weights import weights_hash
from tests.support.models import make_model_dir


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    """A Llama with sinks."""
    page = dataclasses.replace(names.NAMES["llama"], sinks="self_attn.sinks")
    monkeypatch.setitem(names.NAMES, "llama", page)
    config = load_model_config(make_model_dir(tmp_path, "llama"))
    return dataclasses.replace(config, attention=AttentionOptions(has_sinks=True))


def name_of(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.sinks"


def tensors(config: ModelConfig) -> dict[str, torch.Tensor]:
    rows = torch.arange(config.num_layers * config.num_heads).view(config.num_layers, -1) / 8 - 2
    return {name_of(layer): row.bfloat16() for layer, row in enumerate(rows)}


def read(path: Path, config: ModelConfig, stored: dict[str, torch.Tensor]) -> Rows:
    save_file(stored, path / "model.safetensors")
    with open_checkpoint(path, str) as checkpoint:
        return read_sinks(checkpoint, config)


def test_sinks_by_layer_and_head(tmp_path: Path, config: ModelConfig) -> None:
    stored = tensors(config)
    assert read(tmp_path, config, stored) == tuple(tuple(row.tolist()) for row in stored.values())
    assert random_sinks(dataclasses.replace(config, attention=AttentionOptions()), 0) == ()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_error_names_the_tensor_and_its_value(tmp_path: Path, config: ModelConfig, value: float) -> None:
    stored = tensors(config)
    stored[name_of(1)][2] = value
    with pytest.raises(ModelError, match=f"^{name_of(1)} in .*model.safetensors has {value}, expected finite"):
        read(tmp_path, config, stored)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (None, f"lacks {name_of(0)}"),
        (torch.ones(1), rf"{name_of(0)} in .* has shape \(1,\)"),
        (torch.ones(4, 1), rf"{name_of(0)} in .* has shape \(4, 1\)"),
        (torch.ones(4, dtype=torch.int8), f"{name_of(0)} in .* has dtype I8"),
    ],
)
def test_missing_and_misshapen_sinks_are_named(
    tmp_path: Path, config: ModelConfig, row: torch.Tensor | None, words: str
) -> None:
    stored = {name: each for name, each in (tensors(config) | {name_of(0): row}).items() if each is not None}
    with pytest.raises(ModelError, match=words):
        read(tmp_path, config, stored)


def test_random_sinks_depend_on_the_seed_alone(config: ModelConfig) -> None:
    assert random_sinks(config, 3) == random_sinks(config, 3) != random_sinks(config, 4)
    assert [len(row) for row in random_sinks(config, 3)] == [config.num_heads] * config.num_layers


def test_the_hash_of_the_weights_covers_every_sink(tmp_path: Path, config: ModelConfig) -> None:
    stored = tensors(config) | {"a": torch.zeros(1 << 20), "z": torch.zeros(1 << 20)}  # between its samples
    hashes = []
    for change in (0.0, 0.0, 0.5):
        stored[name_of(1)][2] += change
        save_file(stored, tmp_path / "model.safetensors")
        hashes.append(weights_hash(tmp_path, config))
    assert hashes[0] == hashes[1] != hashes[2]
