"""Scales of the KV cache in a checkpoint: all spellings, what is wrong with them, and the hash of the weights."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.config import Config, load_config
from services.common.errors import ModelError
from services.common.kv_cache.scales import KVScales
from services.common.resolve import resolve_model
from services.dense_worker.build import LoadedModel, load_model
from services.dense_worker.model.checkpoint import open_checkpoint
from services.dense_worker.model.learned import read_kv_scales
from tests.support.models import make_model_dir

NUM_LAYERS = 3
KEYS, VALUES = (0.5, 0.25, 0.125), (2.0, 3.0, 4.0)
SPELLINGS = [
    "self_attn.{}_scale", "self_attn.attn.{}_scale", "self_attn.{}_proj.{}_scale", "self_attn.{}_proj.output_scale"
]  # fmt: skip
FP8_SCHEME = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
}


def scale_tensors(spelling: str) -> dict[str, torch.Tensor]:
    return {
        f"model.layers.{layer}.{spelling.format(kind, kind)}": torch.tensor(scales[layer])
        for kind, scales in (("k", KEYS), ("v", VALUES))
        for layer in range(NUM_LAYERS)
    }


def read(path: Path, tensors: dict[str, torch.Tensor], num_layers: int = NUM_LAYERS) -> KVScales | None:
    save_file(tensors, path / "model.safetensors")
    with open_checkpoint(path, str) as checkpoint:
        return read_kv_scales(checkpoint, num_layers)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(("shape", "dtype"), [((), torch.float32), ((1,), torch.bfloat16), ((1, 1), torch.float16)])
def test_every_spelling_and_shape_of_one_number(
    tmp_path: Path, spelling: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensors = {name: scale.view(shape).to(dtype) for name, scale in scale_tensors(spelling).items()}
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.ones(2, 2)
    assert read(tmp_path, tensors) == KVScales(KEYS, VALUES)
    assert read(tmp_path, tensors, num_layers=2) == KVScales(KEYS[:2], VALUES[:2])


def test_a_checkpoint_without_scales_has_none(tmp_path: Path) -> None:
    assert read(tmp_path, {"model.layers.0.self_attn.k_proj.weight_scale": torch.ones(1)}) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 0.0])
def test_the_error_names_the_tensor_and_its_value(tmp_path: Path, value: float) -> None:
    name = "model.layers.1.self_attn.v_proj.v_scale"
    with pytest.raises(ModelError, match=f"^{name} in .*model.safetensors is {value}, expected a finite number"):
        read(tmp_path, scale_tensors(SPELLINGS[2]) | {name: torch.tensor(value)})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.layers.2.self_attn.k_scale": None}, "lacks the k_scale of layer 2's KV cache"),
        ({"model.layers.2.self_attn.k_scale": torch.ones(2)}, r"k_scale in .* has shape \(2,\)"),
        ({"model.layers.2.self_attn.k_scale": torch.ones(0)}, r"k_scale in .* has shape \(0,\)"),
        ({"model.layers.2.self_attn.k_scale": torch.ones(1, dtype=torch.int8)}, "k_scale in .* has dtype I8"),
        ({"model.layers.2.self_attn.k_proj.k_scale": torch.ones(1)}, "k_scale.* for the same scale"),
    ],
)
def test_missing_and_misshapen_scales_are_named(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], words: str
) -> None:
    tensors = {name: each for name, each in (scale_tensors(SPELLINGS[0]) | changes).items() if each is not None}
    with pytest.raises(ModelError, match=words):
        read(tmp_path, tensors)


def load(path: Path, *overrides: str) -> LoadedModel:
    config: Config = load_config(None, [f"model.path={path}", "dense.num_threads=1", *overrides])
    return load_model(config, resolve_model(config.model, "cpu"), lambda line: None)


def add_scales(path: Path, scales: dict[str, torch.Tensor]) -> None:
    file = path / "model.safetensors"
    save_file(load_file(file) | scales, file, metadata={"format": "pt"})


def ask_for_fp8(path: Path) -> None:
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"quantization_config": FP8_SCHEME}))


def test_the_scales_are_part_of_the_hash_of_the_weights_of_an_fp8_cache(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path, "llama")
    ask_for_fp8(path)
    add_scales(path, scale_tensors(SPELLINGS[0]))
    loaded, plain = load(path), load(path, "attention.kv_cache_dtype=model")
    assert (loaded.kv_cache_dtype, loaded.learned.scales) == ("fp8", KVScales(KEYS, VALUES))
    assert (plain.kv_cache_dtype, plain.learned.scales) == ("model", None)
    assert load(path).weights_hash == loaded.weights_hash
    add_scales(path, {"model.layers.2.self_attn.v_scale": torch.tensor(4.5)})
    assert load(path).weights_hash != loaded.weights_hash


def test_a_scheme_without_scales_is_refused_unless_the_config_says_fp8(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path, "llama")
    assert load(path).kv_cache_dtype == "model"
    assert load(path, "attention.kv_cache_dtype=fp8").learned.scales is None
    ask_for_fp8(path)
    with pytest.raises(ModelError, match=r"lacks all its scales, such as model\.layers\.0\.self_attn\.k_proj\.k_scale"):
        load(path)
    assert load(path, "attention.kv_cache_dtype=fp8").kv_cache_dtype == "fp8"
