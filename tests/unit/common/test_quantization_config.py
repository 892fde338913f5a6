"""How quantization_config and hf_quant_config.json are read: as their programs write them, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import ModelError
from services.common.model_config import load_model_config
from services.common.quantization import layer_lists
from services.common.quantization.layer_lists import is_listed
from services.common.quantization.read import read_quantization
from services.common.quantization.schemes import (
    Activations,
    BlockFp8Scheme,
    Element,
    GroupedIntScheme,
    Mxfp4Scheme,
    Packing,
    QuantizationConfig,
    ScaledScheme,
    Scheme,
)
from tests.support.model_configs import write_config
from tests.support.quantized.checkpoints import FORMATS

Q_PROJ = "model.layers.0.self_attn.q_proj"
FP8_STATIC = ScaledScheme(Element.FP8, is_per_channel=False, activations=Activations.STATIC)
SCHEMES: dict[str, Scheme] = {
    "fp8 channel, token": ScaledScheme(Element.FP8, True, Activations.TOKEN),
    "fp8 tensor, static": FP8_STATIC,
    "fp8 blocks": BlockFp8Scheme((128, 128)),
    "fbgemm": ScaledScheme(Element.FP8, True, Activations.TOKEN, 2.0),
    "modelopt": FP8_STATIC,
    "int8 channel, token": ScaledScheme(Element.INT8, True, Activations.TOKEN),
    "int8 channel, weight only": ScaledScheme(Element.INT8, True, Activations.NONE),
    "int4 g128 with zeros": GroupedIntScheme(Packing.COMPRESSED_TENSORS, 4, 128, False, False),
    "int8 g-1 with zeros": GroupedIntScheme(Packing.COMPRESSED_TENSORS, 8, None, False, False),
    "awq g128": GroupedIntScheme(Packing.AWQ, 4, 128, False, False),
    "gptq g32, act-order": GroupedIntScheme(Packing.GPTQ, 4, 32, True, True),
    "gptq_v2": GroupedIntScheme(Packing.GPTQ_V2, 4, 64, False, False),
    "mxfp4": Mxfp4Scheme(is_compressed_tensors=False),
}
# What ModelOpt writes beside config.json.
MODELOPT_FILE = {
    "producer": {"name": "modelopt", "version": "0.23.0"},
    "quantization": {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head", "model.layers.1*"],
    },
}


def read(config: object, modelopt: object = None) -> QuantizationConfig:
    found = read_quantization("/models/a", config, modelopt)
    assert found is not None
    return found


@pytest.mark.parametrize("name", SCHEMES)
def test_the_scheme_of_a_projection(name: str) -> None:
    config = read(FORMATS[name].config)
    assert config.scheme_of(Q_PROJ) == SCHEMES[name]
    assert config.scheme_of("lm_head") is None


def test_an_unquantized_model_has_none(tmp_path: Path) -> None:
    assert load_model_config(write_config(tmp_path, "llama")).quantization is None


def test_only_the_kv_cache_is_quantized() -> None:
    kv_cache = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    config = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": kv_cache}
    assert read_quantization("a", config, None) is None
    assert read_quantization("a", None, {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}) is None


def test_modelopts_file_counts_without_a_quantization_config(tmp_path: Path) -> None:
    path = write_config(tmp_path, "llama")
    (path / "hf_quant_config.json").write_text(json.dumps(MODELOPT_FILE))
    config = load_model_config(path).quantization
    assert config.scheme_of(Q_PROJ) == FP8_STATIC
    assert config.scheme_of("model.layers.1.mlp.up_proj") is None


def test_modelopts_file_must_agree_with_the_quantization_config() -> None:
    assert read(FORMATS["modelopt"].config, MODELOPT_FILE).scheme_of(Q_PROJ) == FP8_STATIC
    with pytest.raises(ModelError, match=r"/models/a: quantization_config of config\.json contradicts hf_quant_config"):
        read(FORMATS["awq g128"].config, MODELOPT_FILE)


def test_two_processes_with_and_without_quantization_run_the_same_model(tmp_path: Path) -> None:
    """The attention worker does not know what the dense worker makes of the weights."""
    plain = load_model_config(write_config(tmp_path / "a", "llama"))
    quantized = load_model_config(write_config(tmp_path / "b", "llama", quantization_config=FORMATS["awq g128"].config))
    assert plain != quantized and plain.fingerprint == quantized.fingerprint


@pytest.mark.parametrize(
    ("entry", "names", "others"),
    [
        ("lm_head", ["lm_head"], [Q_PROJ, "model.lm_head_2"]),
        ("model.layers.1", ["model.layers.1.mlp.up_proj"], ["model.layers.10.mlp.up_proj", Q_PROJ]),
        ("mlp.up_proj", ["model.layers.1.mlp.up_proj"], ["model.layers.1.mlp.up_proj_2"]),
        (r"re:.*self_attn\.[qk]_proj", [Q_PROJ, Q_PROJ.replace("q_", "k_")], [Q_PROJ.replace("q_", "v_")]),
        ("re:layers", [], ["model.layers.1.mlp.up_proj"]),  # it matches from the start
        ("model.layers.0.*", [Q_PROJ], ["model.layers.1.mlp.up_proj"]),
        ("*.q_proj", [Q_PROJ], ["model.layers.0.self_attn.k_proj"]),
        ("model.language_model.layers.0.self_attn", [Q_PROJ], ["model.layers.0.mlp.up_proj"]),
        ("Linear", [Q_PROJ, "lm_head"], []),
    ],
)
def test_lists_of_layers(entry: str, names: list[str], others: list[str]) -> None:
    assert all(is_listed(name, (entry,)) for name in names)
    assert not any(is_listed(name, (entry,)) for name in others)


def test_a_pattern_that_takes_exponential_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the limit this test would hang."""
    monkeypatch.setattr(layer_lists, "MAX_MATCHING_S", 0.1)
    config = read(changed(CHANNEL, "ignore", value=["lm_head", r"re:(\w|\.|[a-z])*0$"]))
    assert config.scheme_of("lm_head") is None, "it is not asked"
    with pytest.raises(ModelError, match=rf"lists of layers, for {Q_PROJ}: patterns take longer than 0\.1 s, such as"):
        config.scheme_of(Q_PROJ)


def test_the_first_group_that_targets_a_layer_counts() -> None:
    config = copy.deepcopy(FORMATS["fp8 channel, token"].config)
    groups = config["config_groups"]
    groups["group_1"] = copy.deepcopy(FORMATS["int4 g128"].config["config_groups"]["group_0"])
    groups["group_1"] |= {"format": "pack-quantized"}
    groups["group_0"]["targets"] = ["re:.*self_attn.*"]
    config["format"] = "mixed-precision"
    groups["group_0"]["format"] = "float-quantized"
    found = read(config)
    assert found.scheme_of(Q_PROJ) == SCHEMES["fp8 channel, token"]
    assert isinstance(found.scheme_of("model.layers.0.mlp.up_proj"), GroupedIntScheme)


def test_gptq_may_name_the_layers_that_are_quantized() -> None:
    blocks = [["self_attn.q_proj", "self_attn.k_proj"], ["self_attn.o_proj"]]
    config = read(changed("gptq g128", "modules_in_block_to_quantize", value=blocks))
    assert isinstance(config.scheme_of(Q_PROJ), GroupedIntScheme)
    assert config.scheme_of("model.layers.0.mlp.up_proj") is None


# As published: what the programs write besides, which changes nothing.
PUBLISHED = [
    {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": False, "sym": True,
        "true_sequential": True, "dataset": None, "block_name_to_quantize": None, "exllama_config": {"version": 1},
        "modules_in_block_to_quantize": None, "use_cuda_fp16": False, "use_exllama": True, "batch_size": 1,
    },
    {
        "quant_method": "gptq", "bits": 4, "dynamic": None, "group_size": 128, "desc_act": True, "sym": True,
        "lm_head": False, "checkpoint_format": "gptq", "pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:2.0"]},
    },
    {
        "quant_method": "awq", "backend": "autoawq", "bits": 4, "do_fuse": False, "exllama_config": None,
        "fuse_max_seq_len": None, "group_size": 128, "modules_to_not_convert": None, "version": "gemm",
        "zero_point": True,
    },
    {
        "quant_method": "fp8", "activation_scheme": "static", "dequantize": False, "weight_block_size": None,
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    },
    {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "frozen",
        "global_compression_ratio": 1.5, "ignore": ["lm_head"], "kv_cache_scheme": None, "version": "0.9.1",
        "sparsity_config": {"format": "dense", "sparsity_structure": "unstructured"}, "transform_config": {},
        "config_groups": {
            "group_0": {
                "targets": ["Linear"], "output_activations": None, "format": None,
                "weights": {
                    "num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False,
                    "actorder": None, "block_structure": None, "group_size": None, "observer": "minmax",
                    "observer_kwargs": {},
                },
                "input_activations": {
                    "num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True,
                    "actorder": None, "block_structure": None, "group_size": None, "observer": None,
                },
            }
        },
    },
    {
        "quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "producer": {"name": "modelopt"},
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}},
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
    },
]  # fmt: skip


@pytest.mark.parametrize("config", PUBLISHED)
def test_fields_without_a_meaning_for_the_weights_are_accepted(config: dict[str, Any]) -> None:
    assert read(config).scheme_of(Q_PROJ) is not None and read(config).scheme_of("lm_head") is None


def changed(name: str, *path: str, value: Any) -> dict[str, Any]:
    """The config of a format with one other value."""
    config = copy.deepcopy(FORMATS[name].config)
    place = config
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return config


WEIGHTS = ("config_groups", "group_0", "weights")
INPUTS = ("config_groups", "group_0", "input_activations")
CHANNEL, PACKED = "fp8 channel, token", "int4 g128"
UNSUPPORTED = [
    ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes', supported: compressed-tensors, fp8"),
    ({}, "quant_method None"),
    ([], r"quantization_config is \[\], expected an object"),
    (changed(CHANNEL, "format", value="nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized', supported"),
    (changed(CHANNEL, "format", value="marlin-24"), r"\(compressed-tensors\) has format 'marlin-24'"),
    (changed(CHANNEL, "quantization_status", value="calibration"), "quantization_status 'calibration'"),
    (changed("gptq g128", "modules_in_block_to_quantize", value="q_proj"), "modules_in_block_to_quantize 'q_proj'"),
    (changed(CHANNEL, "sparsity_config", value={"format": "sparse-24-bitmask"}), "format 'sparse-24-bitmask'"),
    (changed(CHANNEL, "transform_config", value={"config_groups": {"u": {}}}), "transform_config"),
    (changed(CHANNEL, "config_groups", value={}), "config_groups"),
    (changed(CHANNEL, "config_groups", value=None), "config_groups is None, expected an object"),
    (changed(CHANNEL, *WEIGHTS, value=None), "group_0.weights is None"),
    (changed(CHANNEL, *WEIGHTS, "num_bits", value=4), "weights has num_bits 4, supported: 8"),
    (changed(CHANNEL, *WEIGHTS, "strategy", value="group"), "strategy 'group', supported: tensor, channel, block"),
    (changed(CHANNEL, *WEIGHTS, "symmetric", value=False), "symmetric False, supported: True"),
    (changed(CHANNEL, *WEIGHTS, "dynamic", value=True), "weights has dynamic True, supported: none"),
    (changed(CHANNEL, *INPUTS, "strategy", value="group"), "input_activations has strategy 'group'"),
    (changed(CHANNEL, *INPUTS, "num_bits", value=16), "input_activations has num_bits 16"),
    (changed("int8 channel, token", *INPUTS, "symmetric", value=False), "symmetric False, supported: True"),
    (changed(CHANNEL, "config_groups", "group_0", "output_activations", value={"num_bits": 8}), "output_activations"),
    (changed(CHANNEL, "ignore", value=["re:["]), r"lists 're:\[': the pattern '\[' is not valid"),
    (changed(CHANNEL, "ignore", value=["re:" + "a" * 4097]), "has 4097 characters, at most 4096 allowed"),
    (changed(CHANNEL, "ignore", value=["re:((a{1000}){1000}){1000}"]), r"may have \d+ characters or more"),
    (changed(CHANNEL, "ignore", value="lm_head"), "ignore 'lm_head', supported: a list of names"),
    (changed("fp8 blocks of compressed-tensors", *WEIGHTS, "block_structure", value=[64, 64]), "block_structure .*64"),
    (changed(PACKED, *WEIGHTS, "group_size", value=48), "group_size 48, supported: 32, 64, 128"),
    (changed(PACKED, *WEIGHTS, "num_bits", value=3), "num_bits 3, supported: 4, 8"),
    (changed(PACKED, *INPUTS, value={"num_bits": 8}), "input_activations .*, supported: null"),
    (changed("fp8 blocks", "weight_block_size", value=[64, 128]), r"\(fp8\) has weight_block_size \[64, 128\]"),
    (changed("fp8 blocks", "activation_scheme", value="static"), "activation_scheme 'static'"),
    (changed("fp8 blocks", "fmt", value="e5m2"), "fmt 'e5m2'"),
    (changed("fp8 blocks", "scale_fmt", value="ue8m0"), "scale_fmt 'ue8m0'"),
    (changed("fbgemm", "activation_scale_ub", value=-1.0), "activation_scale_ub -1.0"),
    (changed("modelopt", "quant_algo", value="NVFP4"), "quant_algo 'NVFP4', supported: FP8, FP8_PER_CHANNEL_PER_TOKEN"),
    (changed("awq g128", "bits", value=8), r"\(awq\) has bits 8, supported: 4"),
    (changed("awq g128", "version", value="gemv"), "version 'gemv', supported: gemm"),
    (changed("awq g128", "zero_point", value=False), "zero_point False"),
    (changed("awq g128", "group_size", value="128"), "group_size '128', supported: 32, 64, 128, -1"),
    (changed("gptq g128", "bits", value=3), r"\(gptq\) has bits 3, supported: 4, 8"),
    (changed("gptq g128", "bits", value=True), "bits True, supported: 4, 8"),
    (changed("gptq g128", "modules_in_block_to_quantize", value=[["q_proj"], 3]), "modules_in_block_to_quantize .* 3"),
    (changed("gptq g128", "dynamic", value={"-:.*": {}}), "dynamic"),
    (changed("gptq g128", "checkpoint_format", value="marlin"), "checkpoint_format 'marlin'"),
]


@pytest.mark.parametrize(("config", "message"), UNSUPPORTED)
def test_what_is_not_supported_is_refused_by_format_field_and_value(config: object, message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        read(config)
    assert "/models/a: quantization_config" in str(error.value)
