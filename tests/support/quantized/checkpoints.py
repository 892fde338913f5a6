"""Quantized checkpoints of small models, in every format that the dense worker loads, and their meaning."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.quantized.formulas import (
    Quantized,
    awq,
    blocks,
    gptq,
    input_by_constant,
    input_by_group,
    input_by_token,
    mxfp4,
    pack_quantized,
    scaled,
)

PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def static_scale(name: str, element: str) -> float:
    """The scale of a projection's input: another one for each, also within a fused layer."""
    greatest = 448.0 if element == "fp8" else 127.0
    return float(np.float32((4.0 + 0.3 * PARTS.index(name.rpartition(".")[2])) / greatest))


def unchanged(x: np.ndarray, name: str) -> np.ndarray:
    return x


@dataclass(frozen=True)
class Format:
    """One way to quantize a checkpoint."""

    config: dict[str, Any]  # its quantization_config
    quantize: Callable[[np.ndarray], Quantized]
    round_input: Callable[[np.ndarray, str], np.ndarray] = unchanged  # the input of a projection, by its name
    static: str | None = None  # the element type of static scales of the input, if there are any
    static_name: str = "input_scale"
    fields: dict[str, Any] = field(default_factory=dict)  # of config.json


def _compressed(file_format: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": file_format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _eight_bits(kind: str, strategy: str, **others: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False} | others


def _packed(num_bits: int, group_size: int, is_symmetric: bool, seed: int | None = None) -> Format:
    strategy = {"strategy": "channel"} if group_size == -1 else {"strategy": "group", "group_size": group_size}
    order = {"actorder": None if seed is None else "group"}
    weights = {"num_bits": num_bits, "type": "int", "symmetric": is_symmetric, "dynamic": False} | strategy | order
    quantize = partial(
        pack_quantized, num_bits=num_bits, group_size=group_size, is_symmetric=is_symmetric, seed=seed
    )
    return Format(_compressed("pack-quantized", weights), quantize)


def _awq(group_size: int) -> Format:
    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm", "zero_point": True}
    return Format(config | {"modules_to_not_convert": None}, partial(awq, group_size=group_size))


def _gptq(num_bits: int, group_size: int, sym: bool, seed: int | None = None, version: int = 1) -> Format:
    config = {"quant_method": "gptq", "bits": num_bits, "group_size": group_size, "sym": sym}
    config |= {"desc_act": seed is not None, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
    quantize = partial(
        gptq, num_bits=num_bits, group_size=group_size, is_symmetric=sym, seed=seed, version=version
    )
    return Format(config, quantize)


_TOKEN = {element: lambda x, name, element=element: input_by_token(x, element) for element in ("fp8", "int8")}
_STATIC = {
    element: lambda x, name, element=element: input_by_constant(x, element, static_scale(name, element))
    for element in ("fp8", "int8")
}
_RAGGED = {"hidden_size": 192, "intermediate_size": 320}  # blocks of 128 do not divide them
_FP8_CHANNEL = partial(scaled, element="fp8", per="channel")
_FP8_TENSOR = partial(scaled, element="fp8", per="tensor")
_INT8_CHANNEL = partial(scaled, element="int8", per="channel")
_DYNAMIC_TOKEN = {"strategy": "token", "dynamic": True}
_BLOCK_INPUT = {"strategy": "group", "group_size": 128, "dynamic": True}

FORMATS: dict[str, Format] = {
    "fp8 channel, token": Format(
        _compressed("float-quantized", _eight_bits("float", "channel"), _eight_bits("float", **_DYNAMIC_TOKEN)),
        _FP8_CHANNEL,
        _TOKEN["fp8"],
    ),
    "fp8 tensor, static": Format(
        _compressed("float-quantized", _eight_bits("float", "tensor"), _eight_bits("float", "tensor")),
        _FP8_TENSOR,
        _STATIC["fp8"],
        static="fp8",
    ),
    "fp8 channel, weight only": Format(
        _compressed("float-quantized", _eight_bits("float", "channel")), _FP8_CHANNEL
    ),
    "fp8 blocks of compressed-tensors": Format(
        _compressed(
            "float-quantized",
            _eight_bits("float", "block", block_structure=[128, 128]),
            _eight_bits("float", **_BLOCK_INPUT),
        ),
        partial(blocks, name="weight_scale"),
        lambda x, name: input_by_group(x),
    ),
    "fp8 of transformers, dynamic": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic"}, _FP8_TENSOR, _TOKEN["fp8"]
    ),
    "fp8 of transformers, static": Format(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        partial(scaled, element="fp8", per="tensor", name="weight_scale_inv", shape=()),
        _STATIC["fp8"],
        static="fp8",
        static_name="activation_scale",
    ),
    "fp8 blocks": Format(
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        blocks,
        lambda x, name: input_by_group(x),
    ),
    "fp8 blocks, ragged": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        blocks,
        lambda x, name: input_by_group(x),
        fields=_RAGGED,
    ),
    "fbgemm": Format(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 2.0, "modules_to_not_convert": ["lm_head"]},
        _FP8_CHANNEL,
        lambda x, name: input_by_token(x, "fp8", 2.0),
    ),
    "modelopt": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        partial(scaled, element="fp8", per="tensor", shape=()),
        _STATIC["fp8"],
        static="fp8",
    ),
    "int8 channel, token": Format(
        _compressed("int-quantized", _eight_bits("int", "channel"), _eight_bits("int", **_DYNAMIC_TOKEN)),
        _INT8_CHANNEL,
        _TOKEN["int8"],
    ),
    "int8 channel, static": Format(
        _compressed("int-quantized", _eight_bits("int", "channel"), _eight_bits("int", "tensor")),
        _INT8_CHANNEL,
        _STATIC["int8"],
        static="int8",
    ),
    "int8 channel, weight only": Format(_compressed("int-quantized", _eight_bits("int", "channel")), _INT8_CHANNEL),
    **{
        f"int{bits} g{size}{'' if symmetric else ' with zeros'}": _packed(bits, size, symmetric)
        for bits, size, symmetric in [
            (4, 32, True),
            (4, 64, False),
            (4, 128, True),
            (4, 128, False),
            (4, -1, True),
            (8, 128, True),
            (8, -1, False),
        ]
    },
    "int4 g32, act-order": _packed(4, 32, True, seed=1),
    "awq g128": _awq(128),
    "awq g32": _awq(32),
    "awq of whole rows": _awq(-1),
    "gptq g128": _gptq(4, 128, True),
    "gptq g64 with zeros": _gptq(4, 64, False),
    "gptq g32, act-order": _gptq(4, 32, True, seed=2),
    "gptq g32 with zeros, act-order": _gptq(4, 32, False, seed=3),
    "gptq 8 bits": _gptq(8, 64, False),
    "gptq of whole rows": _gptq(4, -1, True),
    "gptq_v2": _gptq(4, 64, False, version=2),
    "mxfp4": Format({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, mxfp4),
    "mxfp4 of compressed-tensors": Format(
        _compressed(
            "mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
        ),
        partial(mxfp4, is_compressed_tensors=True),
    ),
}


def quantize_model_dir(path: Path, used: Format, ignored: tuple[str, ...] = ("lm_head",)) -> dict[str, torch.Tensor]:
    """Quantizes the projections of the checkpoint in `path`; returns its tensors, dequantized, in float32."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    stored, plain = {}, {name: tensor.float() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        projection, _, kind = name.rpartition(".")
        if kind != "weight" or projection.rpartition(".")[2] not in PARTS or projection in ignored:
            stored[name] = tensor
            continue
        quantized = used.quantize(tensor.double().numpy())
        stored |= {f"{projection}.{rest}": value for rest, value in quantized.tensors.items()}
        plain[name] = torch.from_numpy(quantized.matrix).float()
        if used.static is not None:
            has_list = used.config["quant_method"] == "compressed-tensors"  # of one number
            scale = torch.tensor(static_scale(projection, used.static))
            stored[f"{projection}.{used.static_name}"] = scale[None] if has_list else scale
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, file)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": used.config}))
    return plain


def dequantized_model(plain_dir: Path, plain: Mapping[str, torch.Tensor], used: Format) -> PreTrainedModel:
    """transformers in float32 with the dequantized weights; inputs of quantized projections are rounded."""
    model = AutoModelForCausalLM.from_pretrained(plain_dir, dtype=torch.float32, attn_implementation="sdpa").eval()
    model.load_state_dict({name: tensor for name, tensor in plain.items()}, strict=False)

    def hook(name: str) -> Callable[..., tuple[torch.Tensor]]:
        return lambda module, inputs: (torch.from_numpy(used.round_input(inputs[0].double().numpy(), name)).float(),)

    for name, module in model.named_modules():
        if name.rpartition(".")[2] in PARTS:
            module.register_forward_pre_hook(hook(name))
    return model
