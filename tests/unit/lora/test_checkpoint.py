"""Adapters that are damaged, hostile, of another model, or more than LoRA: each is refused with what is wrong."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from services.common.errors import InvalidRequest
from services.lora import adapter_config
from services.lora.adapter_config import parse_adapter_config
from services.lora.checkpoint import adapter_hash, check_adapter, read_adapter
from services.lora.shapes import adapted_shapes
from tests.support.adapters import ALL_MODULES, make_adapter
from tests.support.model_configs import small_config
from tests.support.models import make_model_dir

CONFIG = small_config("qwen2")
SHAPES = adapted_shapes(CONFIG)
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
MAX_RANK = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"), "qwen2")


def check(path: Path, max_rank: int = MAX_RANK) -> str:
    return check_adapter(path, SHAPES, max_rank)


def change_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, path / "adapter_model.safetensors")


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type 'IA3', supported: 'LORA'"),
    ({"use_dora": True}, "use_dora true, which is not supported"),
    ({"modules_to_save": ["lm_head"]}, r'modules_to_save \["lm_head"\]'),
    ({"bias": "all"}, "bias 'all', supported: 'none'"),
    ({"lora_bias": True}, "lora_bias true"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"target_modules": ["q_proj", "lm_head"]}, "targets 'lm_head'"),
    ({"target_modules": ["embed_tokens"]}, "targets 'embed_tokens'"),
    ({"target_modules": []}, "no target_modules"),
    ({"target_modules": ["c_attn"]}, "none of the model's linear layers"),
    ({"target_modules": 7}, "target_modules 7, expected a string or a list"),
    ({"init_lora_weights": "pissa_niter_4"}, "changes the base model's weights"),
    ({"r": 65}, "LoRA rank 65 of 'r' is greater than max_lora_rank 64"),
    ({"r": 1024}, "is greater than max_lora_rank"),
    ({"r": 0}, "r 0, expected a whole number of at least 1"),
    ({"r": True}, "r true, expected a whole number"),
    ({"r": 8.5}, "r 8.5, expected a whole number"),
    ({"rank_pattern": {"q_proj": 100}}, "LoRA rank 100 of 'q_proj' is greater than max_lora_rank 64"),
    ({"rank_pattern": 3}, "rank_pattern 3, expected an object"),
    ({"lora_alpha": "x"}, "lora_alpha 'x', expected a number"),
    ({"target_modules": "(q_proj"}, r"the pattern '\(\?:\(q_proj"),
    ({"target_modules": "(" * 5000}, "has 5006 characters, at most 4096 allowed"),
    ({"target_modules": "(" * 1000 + ")" * 1000}, "is not valid"),  # nested too deeply
    ({"target_modules": "(((a{1000}){1000}){1000}){1000}"}, r"may have \d+ characters or more .* most 100000"),
    ({"target_modules": "(" * 60 + "a" + "+)" * 60}, r"may have \d+ characters or more"),
    ({"target_modules": "(?R)*"}, "is not valid: unknown group at 3"),  # a pattern that contains itself
    ({"rank_pattern": {"(": 4}}, r"pattern .* is not valid: missing \)"),
    ({"target_modules": ["a"] * 4097}, "target_modules with 4097 entries, at most 4096 allowed"),
    ({"layers_to_transform": [0] * 4097}, "layers_to_transform with 4097 entries, at most 4096 allowed"),
    ({"r": 4}, r"has shape \[8, 96\], the served model and the adapter's rank call for \[4, 96\]"),
    ({"target_modules": ["q_proj"]}, "is not A or B of a targeted linear layer"),
]


@pytest.mark.parametrize(("config", "words"), CONFIGS, ids=[str(config)[:40] for config, _ in CONFIGS])
def test_a_config_that_is_more_than_lora_is_refused_by_name(
    tmp_path: Path, model: Path, config: dict[str, Any], words: str
) -> None:
    path = make_adapter(tmp_path / "a", model)
    text = json.loads((path / "adapter_config.json").read_text()) | config
    (path / "adapter_config.json").write_text(json.dumps(text))
    with pytest.raises(InvalidRequest, match=words) as refused:
        check(path)
    assert len(str(refused.value)) < 500


def poison(value: float, dtype: torch.dtype) -> Callable[[dict[str, torch.Tensor]], object]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[Q] = tensors[Q].to(dtype)
        tensors[Q][1, 2] = value

    return change


TENSORS: list[tuple[str, Callable[[dict[str, torch.Tensor]], object], str]] = [
    ("missing", lambda tensors: tensors.pop(Q), "lacks 1 tensors, such as .*q_proj.lora_A"),
    ("extra", lambda tensors: tensors.update({"x.lora_A.weight": torch.zeros(1)}), "has 'x.lora_A.weight', which is"),
    (
        "magnitude",
        lambda tensors: tensors.update({Q.replace("lora_A.weight", "lora_magnitude_vector"): torch.zeros(1)}),
        "lora_magnitude_vector'",
    ),
    ("shape", lambda tensors: tensors.update({Q: torch.zeros(8, 65)}), r"has shape \[8, 65\]"),
    ("dtype", lambda tensors: tensors.update({Q: torch.zeros(8, 64, dtype=torch.int8)}), "dtype 'I8', supported: F32"),
    ("nan", poison(torch.nan, torch.float32), "has values that are not finite"),
    ("inf in float16", poison(torch.inf, torch.float16), "has values that are not finite"),
    ("nan in bfloat16", poison(-torch.nan, torch.bfloat16), "has values that are not finite"),
]


@pytest.mark.parametrize(("change", "words"), [each[1:] for each in TENSORS], ids=[each[0] for each in TENSORS])
def test_wrong_tensors_are_refused_by_name(
    tmp_path: Path, model: Path, change: Callable[[dict[str, torch.Tensor]], object], words: str
) -> None:
    path = make_adapter(tmp_path / "a", model)
    change_tensors(path, change)
    with pytest.raises(InvalidRequest, match=words):
        check(path)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    other = make_model_dir(tmp_path / "other", "qwen2", hidden_size=32)
    with pytest.raises(InvalidRequest, match=r"has shape \[8, 32\].* call for \[8, 64\]|has shape"):
        check(make_adapter(tmp_path / "a", other))
    deeper = make_model_dir(tmp_path / "deeper", "qwen2", num_hidden_layers=5)
    with pytest.raises(InvalidRequest, match=r"layers\.[34]\..* is not A or B of a targeted linear layer"):
        check(make_adapter(tmp_path / "b", deeper))


def header(size: int, text: bytes) -> bytes:
    return size.to_bytes(8, "little") + text


def header_of(shape: str, end: int = 4) -> bytes:
    text = f'{{"a":{{"dtype":"F32","shape":[{shape}],"data_offsets":[0,{end}]}}}}'
    return header(len(text), text.encode())


FILES: list[tuple[bytes, str]] = [
    (b"", "truncated"),
    (b"\0" * 7, "truncated"),
    (header(2**62, b"{}"), "its header has 4611686018427387904 bytes, at most 2 expected"),
    (header(9, b"{}"), "its header has 9 bytes, at most 2 expected"),
    (header(2**24 + 1, b" " * 2**25), "its header has 16777217 bytes, at most 16777216 expected"),
    (header(2, b"[]"), "not safetensors"),
    (header(4, b'{"a"'), "not safetensors"),
    (header(8, b"\xff" * 8), "not safetensors"),
    (header(2**20, b"\xff" * 2**20), "not safetensors: UnicodeDecodeError: .{,200}$"),  # and not the whole header
    (header(12, b'{"a":{"b":1}'), "not safetensors"),
    (header_of("9", 36), "not safetensors.* has shape .* of 62 bytes|lies at 0 to 36"),
    (header_of("-1"), r"has shape \[-1\] at 0 to 4 of \d+ bytes"),
    (header_of("1" * 4000 + ",0"), r"has shape \[1111"),
    (header_of(",".join(["1"] * 9)), "has 9 dimensions, at most 8 allowed"),
    (header(100_000, b"[" * 100_000), "not safetensors"),
]


@pytest.mark.parametrize(("data", "words"), FILES, ids=range(len(FILES)))
def test_a_damaged_file_is_refused_without_taking_memory(tmp_path: Path, model: Path, data: bytes, words: str) -> None:
    path = make_adapter(tmp_path / "a", model, modules=("q_proj",))
    (path / "adapter_model.safetensors").write_bytes(data)
    with pytest.raises(InvalidRequest, match=words):
        check(path)


def test_a_cut_file_is_refused_wherever_it_is_cut(tmp_path: Path, model: Path) -> None:
    path = make_adapter(tmp_path / "a", model, modules=("q_proj",))
    file = path / "adapter_model.safetensors"
    data = file.read_bytes()
    for size in (1, 8, 100, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:size])
        with pytest.raises(InvalidRequest, match=r"truncated|not safetensors"):
            check(path)


def test_files_that_are_no_files_are_refused_at_once(tmp_path: Path, model: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"adapter_config\.json cannot be read: No such file"):
        check(tmp_path)
    path = make_adapter(tmp_path / "a", model)
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    with pytest.raises(InvalidRequest, match=r"adapter_model\.bin, supported: adapter_model\.safetensors"):
        check(path)
    os.mkfifo(path / "adapter_model.safetensors")  # opening it for reading would wait for a writer
    with pytest.raises(InvalidRequest, match="not a regular file"):
        check(path)
    for text, words in ((b"this is not json", "not JSON"), (b"[" * 10**5, "not JSON"), (b"[]", "JSON list"),
                        (b" " * (2**20 + 1), "1048577 bytes, at most 1048576")):  # fmt: skip
        (path / "adapter_config.json").write_bytes(text)
        with pytest.raises(InvalidRequest, match=words):
            check(path)


def test_a_pattern_that_takes_exponential_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the limit this test would hang."""
    monkeypatch.setattr(adapter_config, "MAX_MATCHING_S", 0.1)
    text = json.dumps({"peft_type": "LORA", "target_modules": r"(\w|\.|[a-z])*0"})
    with pytest.raises(InvalidRequest, match=r"take longer than 0\.1 s"):
        parse_adapter_config(text.encode(), MAX_RANK).modules(SHAPES)


def test_the_hash_changes_with_every_value_and_with_the_scale(tmp_path: Path, model: Path) -> None:
    first = check(make_adapter(tmp_path / "a", model))
    assert check(make_adapter(tmp_path / "b", model)) == first, "it does not depend on names or directories"
    tensors = read_adapter(tmp_path / "a", SHAPES, MAX_RANK)
    assert adapter_hash(tensors.items()) == first
    others = {
        check(make_adapter(tmp_path / "c", model, alpha=17)),
        check(make_adapter(tmp_path / "d", model, use_rslora=True)),
        check(make_adapter(tmp_path / "e", model, seed=1)),
        check(make_adapter(tmp_path / "f", model, dtype=torch.float16)),
        check(make_adapter(tmp_path / "g", model, modules=ALL_MODULES[1:])),
    }
    change_tensors(tmp_path / "a", lambda tensors: tensors[Q].__setitem__((0, 0), 5.0))
    others.add(check(tmp_path / "a"))
    assert first not in others and len(others) == 6


@given(key=st.text("ab.", min_size=1, max_size=5), name=st.text("ab.", max_size=7))
def test_a_plain_key_of_rank_pattern_matches_what_its_pattern_matches(key: str, name: str) -> None:
    text = json.dumps({"peft_type": "LORA", "r": 8, "target_modules": "all-linear", "rank_pattern": {key: 16}})
    found = parse_adapter_config(text.encode(), MAX_RANK).modules([name])
    assert found[name].rank == (16 if re.match(rf"(.*\.)?({key})$", name) else 8)


def test_every_layer_of_a_large_model_may_have_a_key() -> None:
    """More keys than the package regex keeps compiled patterns: compiling them anew for each name took minutes."""
    names = [f"model.layers.{i}.mlp.{name}_proj" for i in range(200) for name in ("gate", "up", "down")]
    ranks = {name: 1 + i % 64 for i, name in enumerate(names)}
    raw = {"peft_type": "LORA", "target_modules": "all-linear", "rank_pattern": ranks, "alpha_pattern": ranks}
    found = parse_adapter_config(json.dumps(raw).encode(), MAX_RANK).modules(names)
    assert {name: module.rank for name, module in found.items()} == ranks


# What PEFT 0.21.2 did with these settings and this model, by `get_peft_model` and its modules' `scaling`.
PEFT: list[tuple[dict[str, Any], dict[str, tuple[int, float]]]] = [
    ({"r": 4, "lora_alpha": 8, "target_modules": r".*layers\.[02]\.(self_attn\.o_proj|mlp\.down_proj)"},
     {f"model.layers.{i}.{name}": (4, 2.0) for i in (0, 2) for name in ("self_attn.o_proj", "mlp.down_proj")}),
    ({"r": 8, "lora_alpha": 16, "target_modules": ["k_proj", "up_proj"],
      "rank_pattern": {"k_proj": 32, r"layers\.1\.mlp\.up_proj": 2}, "alpha_pattern": {"up_proj": 1}},
     {f"model.layers.{i}.self_attn.k_proj": (32, 0.5) for i in range(3)}
     | {f"model.layers.{i}.mlp.up_proj": (2, 0.5) if i == 1 else (8, 0.125) for i in range(3)}),
    ({"r": 16, "lora_alpha": 8, "target_modules": "all-linear", "use_rslora": True, "exclude_modules": r".*\.[12]\..*"},
     {name: (16, 2.0) for name in SHAPES if ".layers.0." in name}),
    ({"r": 8, "lora_alpha": 8, "target_modules": ["mlp.down_proj"], "layers_to_transform": [0, 2],
      "layers_pattern": "layers"}, {f"model.layers.{i}.mlp.down_proj": (8, 1.0) for i in (0, 2)}),
    ({"r": 8, "lora_alpha": 8, "target_modules": ["v_proj"], "layers_to_transform": 1},
     {"model.layers.1.self_attn.v_proj": (8, 1.0)}),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "expected"), PEFT, ids=range(len(PEFT)))
def test_modules_ranks_and_scales_are_those_of_peft(
    settings: dict[str, Any], expected: dict[str, tuple[int, float]]
) -> None:
    config = parse_adapter_config(json.dumps({"peft_type": "LORA"} | settings).encode(), MAX_RANK)
    found = {name: (module.rank, module.scale) for name, module in config.modules(SHAPES).items()}
    assert found == expected


def test_values_of_every_dtype_are_read_as_they_are(tmp_path: Path, model: Path) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        path = make_adapter(tmp_path / str(dtype), model, modules=("q_proj",), dtype=dtype)
        found = read_adapter(path, SHAPES, MAX_RANK)["model.layers.0.self_attn.q_proj"].a
        values = load_file(path / "adapter_model.safetensors")[Q]
        bits = values.view(torch.int16).numpy().view(np.uint16) if dtype is torch.bfloat16 else values.numpy()
        assert np.array_equal(found, bits)


@pytest.mark.parametrize("wrapper", ["model.language_model.", "language_model.model."])
def test_the_text_part_of_a_model_that_sees_pictures_has_other_names(wrapper: str, model: Path, tmp_path: Path) -> None:
    """In the tensors, and in patterns for whole names. It is the same adapter."""
    path = make_adapter(tmp_path / "adapter", model, modules=("q_proj", "down_proj"))
    expected = check(path)
    config = json.loads((path / "adapter_config.json").read_text())
    prefix = "base_model.model."
    wrapped = {
        name.replace(f"{prefix}model.", f"{prefix}{wrapper}"): tensor
        for name, tensor in load_file(path / "adapter_model.safetensors").items()
    }
    save_file(wrapped, path / "adapter_model.safetensors")
    assert check(path) == expected
    pattern = {"target_modules": rf"{re.escape(wrapper)}.*\.(q_proj|down_proj)"}
    (path / "adapter_config.json").write_text(json.dumps(config | pattern))
    assert check(path) == expected
