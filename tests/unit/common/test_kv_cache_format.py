"""The scheme that a checkpoint's files ask for, as compressed-tensors and ModelOpt write them, and its format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from services.common.config import EMBEDDED_MODEL, AttentionSection, ModelSection
from services.common.errors import ConfigError, ModelError
from services.common.kv_cache.format import resolve_kv_cache_format
from services.common.resolve import ResolvedModel, resolve_model

STATIC_FP8 = {
    "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8,
    "observer": "minmax", "observer_kwargs": {}, "strategy": "tensor", "symmetric": True, "type": "float",
}  # fmt: skip
TENSORS = {"quant_method": "compressed-tensors", "config_groups": {}, "format": "dense", "ignore": []}


def resolve(path: Path, quantization: object, hf_quant_config: object = None) -> ResolvedModel:
    raw = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"quantization_config": quantization}))
    if hf_quant_config is not None:
        (path / "hf_quant_config.json").write_text(json.dumps(hf_quant_config))
    shutil.copy(EMBEDDED_MODEL / "generation_config.json", path)
    return resolve_model(ModelSection(path=path), "cpu")


@pytest.mark.parametrize(
    ("quantization", "hf_quant_config"),
    [
        (TENSORS | {"kv_cache_scheme": STATIC_FP8}, None),
        (TENSORS | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, None),
        ({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}, None),
        (None, {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}),
    ],
)
def test_auto_takes_the_fp8_scheme_of_a_checkpoint(tmp_path: Path, quantization: Any, hf_quant_config: Any) -> None:
    model = resolve(tmp_path, quantization, hf_quant_config)
    assert resolve_kv_cache_format(AttentionSection(), model) == "fp8"
    for name in ("model", "int8", "fp8"):
        assert resolve_kv_cache_format(AttentionSection(kv_cache_dtype=name), model) == name


@pytest.mark.parametrize("quantization", [None, {"quant_method": "fp8", "kv_cache_scheme": None}])
def test_auto_is_the_dtype_of_the_model_without_a_scheme(tmp_path: Path, quantization: Any) -> None:
    model = resolve(tmp_path, quantization)
    assert resolve_kv_cache_format(AttentionSection(), model) == "model"
    assert resolve_kv_cache_format(AttentionSection(kv_cache_dtype="fp8"), model) == "fp8"


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        (TENSORS | {"kv_cache_scheme": STATIC_FP8 | {"type": "int"}}, '"type": "int"'),
        (TENSORS | {"kv_cache_scheme": STATIC_FP8 | {"num_bits": 4}}, '"num_bits": 4'),
        (TENSORS | {"kv_cache_scheme": STATIC_FP8 | {"dynamic": True}}, '"dynamic": true'),
        (TENSORS | {"kv_cache_scheme": STATIC_FP8 | {"strategy": "attn_head"}}, '"strategy": "attn_head"'),
        (TENSORS | {"kv_cache_scheme": STATIC_FP8 | {"symmetric": False}}, '"symmetric": false'),
        (TENSORS | {"kv_cache_scheme": "static"}, '"static"'),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, '"NVFP4"'),
    ],
)
def test_another_scheme_is_refused_by_name_unless_the_config_chooses(
    tmp_path: Path, quantization: Any, words: str
) -> None:
    model = resolve(tmp_path, quantization)
    with pytest.raises(ConfigError, match=f"kv_cache_dtype is 'auto'.*{words}"):
        resolve_kv_cache_format(AttentionSection(), model)
    assert resolve_kv_cache_format(AttentionSection(kv_cache_dtype="int8"), model) == "int8"


def test_a_scheme_does_not_hide_weights_that_are_not_supported(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="bitsandbytes"):
        resolve(tmp_path, {"quant_method": "bitsandbytes", "load_in_8bit": True, "kv_cache_scheme": STATIC_FP8})
