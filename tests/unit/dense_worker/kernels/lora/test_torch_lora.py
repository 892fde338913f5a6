"""Rows with adapters get the logits of a model with these adapters merged in; all others those of the model alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import ConfigError
from services.common.model_config import ModelConfig, load_model_config
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.kernels.lora.torch_lora import TorchLora, group_rows
from services.dense_worker.model.torch_operations import TorchOperations
from services.dense_worker.model.weights import empty_weights, load_weights
from services.dense_worker.parameters import parts_of_type
from services.lora.checkpoint import read_adapter
from services.lora.shapes import adapted_shapes
from services.step import StepPlan
from tests.support.adapters import make_adapter, merge_adapter
from tests.support.dense.family_models import VARIANTS, make_family_model
from tests.support.dense.steps import Step, relative_error, run_step
from tests.support.models import FAMILIES, make_model_dir

torch.set_num_threads(1)
CPU = torch.device("cpu")
TOKEN_IDS = list(range(9))
SLOTS = np.array([0, 1, -1, 2, 1, 0, 0, -1, 2])
LLAMAS = {f"self_attn.{each}_proj" for each in "qkvo"} | {f"mlp.{each}_proj" for each in ("gate", "up", "down")}
ADAPTERS: list[dict[str, Any]] = [
    {"rank": 4, "alpha": 8, "dtype": torch.bfloat16},
    {"rank": 16, "alpha": 4, "modules": ("q_proj", "v_proj", "down_proj"), "use_rslora": True},
    {"rank": 8, "modules": ("k_proj", "o_proj", "up_proj", "gate_proj"), "ranks": {"k_proj": 32, "up_proj": 5}},
]


class Models:
    """A model, its adapters in slots 0, 1, ..., and the merged models by slot; -1 is the model itself."""

    def __init__(self, directory: Path, family: str, adapters: list[dict[str, Any]]) -> None:
        model = make_model_dir(directory / "model", family)
        self.config: ModelConfig = load_model_config(model)
        weights = load_weights(model, self.config, torch.float32, CPU)
        self.lora = TorchLora(parts_of_type(Linear, weights.layers), len(adapters), torch.float32, CPU)
        self.backend = TorchBackend(weights, TorchOperations(self.lora))
        self.merged = {-1: TorchBackend(weights)}
        for slot, options in enumerate(adapters):
            adapter = make_adapter(directory / f"adapter{slot}", model, seed=slot, **options)
            merged = merge_adapter(directory / f"merged{slot}", model, adapter)
            self.lora.store(slot, read_adapter(adapter, adapted_shapes(self.config), 64))
            self.merged[slot] = TorchBackend(load_weights(merged, self.config, torch.float32, CPU))


@pytest.mark.parametrize("family", [*FAMILIES, "gemma", "cohere", "granite"])
def test_logits_are_those_of_merged_weights(tmp_path: Path, family: str) -> None:
    models = Models(tmp_path, family, ADAPTERS)
    rows = list(range(len(TOKEN_IDS)))
    models.lora.begin_step(SLOTS)
    found = run_step(models.backend, models.config, torch.float32, TOKEN_IDS, rows)
    for slot, merged in models.merged.items():
        expected = run_step(merged, models.config, torch.float32, TOKEN_IDS, rows)
        own = slot == SLOTS
        assert relative_error(found[own], expected[own]) < 1e-5
        assert relative_error(found[~own], expected[~own]) > 1e-2, "no other row looks like this one"
    models.lora.begin_step(None)
    alone = run_step(models.merged[-1], models.config, torch.float32, TOKEN_IDS, rows)
    assert torch.equal(run_step(models.backend, models.config, torch.float32, TOKEN_IDS, rows), alone)


def test_rows_of_last_are_selected_anew_in_each_call(tmp_path: Path) -> None:
    """As for the log-probabilities of a prompt; a call without any adapter's row must not end the others' deltas."""
    models = Models(tmp_path, "llama", ADAPTERS)
    models.lora.begin_step(SLOTS)
    every = run_step(models.backend, models.config, torch.float32, TOKEN_IDS, list(range(len(TOKEN_IDS))))
    step = Step(models.backend, models.config, torch.float32, TOKEN_IDS)
    step.begin()
    for layer in range(models.config.num_layers - 1):
        step.middle(layer)
    for rows in ([2, 7], [8, 0, 0, 4], [3]):
        assert relative_error(step.logits(rows), every[rows]) < 1e-6


def test_a_slot_can_be_filled_with_another_adapter(tmp_path: Path) -> None:
    models = Models(tmp_path, "qwen3", ADAPTERS[:2])
    model = tmp_path / "model"
    adapter = make_adapter(tmp_path / "other", model, rank=2, seed=9, modules=("v_proj",))
    models.lora.store(0, read_adapter(adapter, adapted_shapes(models.config), 64))
    merged_path = merge_adapter(tmp_path / "merged", model, adapter)
    merged = TorchBackend(load_weights(merged_path, models.config, torch.float32, CPU))
    models.lora.begin_step(np.zeros(3, np.int64))
    models.backend.begin_step(StepPlan(1), 3)
    found = run_step(models.backend, models.config, torch.float32, [5, 6, 7], [0, 2])
    assert relative_error(found, run_step(merged, models.config, torch.float32, [5, 6, 7], [0, 2])) < 1e-5


@given(st.lists(st.integers(-1, 7), max_size=40))
@settings(deadline=None)
def test_every_row_with_an_adapter_is_in_the_group_of_its_slot(slots: list[int]) -> None:
    groups = group_rows(torch.tensor(slots, dtype=torch.int64))
    assert [slot for slot, _ in groups] == sorted({slot for slot in slots if slot >= 0})
    found = {row: slot for slot, rows in groups for row in rows.tolist()}
    assert found == {row: slot for row, slot in enumerate(slots) if slot >= 0}
    assert sum(len(rows) for _, rows in groups) == len(found), "no row is in two groups"


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3", *VARIANTS])
def test_the_shapes_are_those_of_the_models_linear_layers_if_they_are_named_like_llamas(
    variant: str, tmp_path: Path
) -> None:
    make = make_family_model if variant in VARIANTS else make_model_dir
    config = load_model_config(make(tmp_path, variant))
    layers = empty_weights(config, torch.float32, torch.device("meta")).layers
    found = {
        projection.name: (projection.out_features, linear.in_features)
        for linear in parts_of_type(Linear, layers)
        for projection in linear.merged_from
    }
    names = {name.partition(".layers.")[2].partition(".")[2] for name in found}
    if names == LLAMAS and config.parts.experts is None and not config.attention.layer_heads:
        assert adapted_shapes(config) == found
    else:
        with pytest.raises(ConfigError, match=rf"{config.family} has no adapters here, supported: .* self_attn"):
            adapted_shapes(config)
