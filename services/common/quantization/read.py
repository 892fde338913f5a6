"""Reads how a checkpoint is quantized: `quantization_config` of config.json, or ModelOpt's hf_quant_config.json."""

from __future__ import annotations

from collections.abc import Callable

from services.common.errors import ModelError
from services.common.json_files.fields import Fields
from services.common.quantization.compressed_tensors import BLOCK, GROUP_SIZES, read_compressed_tensors
from services.common.quantization.layer_lists import read_layers
from services.common.quantization.schemes import (
    LM_HEAD,
    Activations,
    BlockFp8Scheme,
    Element,
    GroupedIntScheme,
    Mxfp4Scheme,
    Packing,
    QuantizationConfig,
    ScaledScheme,
    Scheme,
    SchemeGroup,
)

MODELOPT_FILE = "hf_quant_config.json"


def read_quantization(where: str, config: object, modelopt: object) -> QuantizationConfig | None:
    """The quantization of a checkpoint; None if it has none.

    `where` names the checkpoint in errors, `config` is the `quantization_config` of its config.json, `modelopt` the
    contents of its hf_quant_config.json; None stands for one that is absent. Raises ModelError, naming format, field
    and value, for whatever is not supported.
    """
    if config is None:
        if modelopt is None:
            return None
        return _read_modelopt(Fields(modelopt, f"{where}: {MODELOPT_FILE}"))
    fields = Fields(config, f"{where}: quantization_config")
    method = fields.one_of("quant_method", tuple(_READERS))
    found = _READERS[method](Fields(config, f"{where}: quantization_config ({method})"))
    if modelopt is not None:
        other = _read_modelopt(Fields(modelopt, f"{where}: {MODELOPT_FILE}"))
        if (other and other.groups) != (found and found.groups):
            raise ModelError(f"{where}: quantization_config of config.json contradicts {MODELOPT_FILE}")
    return found


def _everywhere(method: str, scheme: Scheme, ignored: tuple[str, ...], has_lm_head: bool = False) -> QuantizationConfig:
    """One scheme for all linear layers but the ignored ones, and lm_head unless `has_lm_head`."""
    return QuantizationConfig(
        method, (SchemeGroup(("Linear",), scheme),), ignored if has_lm_head else (*ignored, LM_HEAD)
    )


def _read_fp8(fields: Fields) -> QuantizationConfig:
    """As DeepSeek, Qwen and transformers write it: blocks, or one scale for each projection."""
    fields.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    fields.refuse("scale_fmt")
    activations = fields.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    ignored = read_layers(fields, "modules_to_not_convert", "ignored_layers")
    block = fields.get("weight_block_size")
    if block is None:
        kind = Activations.STATIC if activations == "static" else Activations.TOKEN
        return _everywhere("fp8", ScaledScheme(Element.FP8, is_per_channel=False, activations=kind), ignored)
    if block != [BLOCK, BLOCK]:
        raise fields.unsupported("weight_block_size", block, f"[{BLOCK}, {BLOCK}]")
    fields.one_of("activation_scheme", ("dynamic",), "dynamic")
    return _everywhere("fp8", BlockFp8Scheme((BLOCK, BLOCK)), ignored)


def _read_fbgemm_fp8(fields: Fields) -> QuantizationConfig:
    bound = fields.number("activation_scale_ub", 1200.0)
    scheme = ScaledScheme(Element.FP8, is_per_channel=True, activations=Activations.TOKEN, max_activation=bound)
    return _everywhere("fbgemm_fp8", scheme, read_layers(fields, "modules_to_not_convert"))


def _read_awq(fields: Fields) -> QuantizationConfig:
    fields.one_of("version", ("gemm", "GEMM"), "gemm")
    bits = fields.one_of(fields.first_of("bits", "w_bit"), (4,))
    fields.one_of("zero_point", (True,), True)
    group_size = _group_size(fields, fields.first_of("group_size", "q_group_size"))
    scheme = GroupedIntScheme(Packing.AWQ, bits, group_size, is_symmetric=False, has_order=False)
    return _everywhere("awq", scheme, read_layers(fields, "modules_to_not_convert"))


def _read_gptq(fields: Fields) -> QuantizationConfig:
    bits = fields.one_of("bits", (4, 8))
    version = fields.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    fields.refuse("dynamic", "is_marlin_format")
    fields.one_of("pack_dtype", ("int32",), "int32")
    scheme = GroupedIntScheme(
        Packing(version),
        bits,
        _group_size(fields, "group_size"),
        is_symmetric=fields.one_of("sym", (True, False), True),
        has_order=fields.one_of("desc_act", (True, False), False),
    )
    ignored = read_layers(fields, "modules_to_not_convert")
    blocks = fields.get("modules_in_block_to_quantize")
    if blocks is None:
        has_lm_head = fields.one_of("lm_head", (True, False), False)
        return _everywhere("gptq", scheme, ignored, has_lm_head)
    is_nested = isinstance(blocks, list) and all(isinstance(each, list) for each in blocks)
    names = [name for each in blocks for name in each] if is_nested else blocks
    targets = read_layers(Fields({"modules_in_block_to_quantize": names}, fields.where), "modules_in_block_to_quantize")
    return QuantizationConfig("gptq", (SchemeGroup(targets, scheme),), ignored)


def _group_size(fields: Fields, name: str) -> int | None:
    size = fields.one_of(name, (*GROUP_SIZES, -1))
    return None if size == -1 else size


def _read_mxfp4(fields: Fields) -> QuantizationConfig:
    return _everywhere("mxfp4", Mxfp4Scheme(is_compressed_tensors=False), read_layers(fields, "modules_to_not_convert"))


_MODELOPT_SCHEMES = {
    "FP8": ScaledScheme(Element.FP8, is_per_channel=False, activations=Activations.STATIC),
    "FP8_PER_CHANNEL_PER_TOKEN": ScaledScheme(Element.FP8, is_per_channel=True, activations=Activations.TOKEN),
}


def _read_modelopt(fields: Fields) -> QuantizationConfig | None:
    """ModelOpt's `quantization_config`, flat, or with the object `quantization` of hf_quant_config.json."""
    if fields.get("quantization") is not None:
        fields = fields.inner("quantization")
    if fields.get("quant_algo") is None and fields.get("kv_cache_quant_algo") is not None:
        return None  # only the KV cache is quantized
    algorithm = fields.one_of("quant_algo", tuple(_MODELOPT_SCHEMES))
    ignored = read_layers(fields, "ignore", "exclude_modules")
    return _everywhere("modelopt", _MODELOPT_SCHEMES[algorithm], ignored)


_READERS: dict[str, Callable[[Fields], QuantizationConfig | None]] = {  # by quant_method
    "compressed-tensors": read_compressed_tensors,
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fbgemm_fp8,
    "modelopt": _read_modelopt,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "mxfp4": _read_mxfp4,
}
