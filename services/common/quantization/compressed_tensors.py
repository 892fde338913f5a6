"""Reads the `quantization_config` of compressed-tensors, which llm-compressor writes."""

from __future__ import annotations

from services.common.json_files.fields import Fields
from services.common.quantization.layer_lists import read_layers
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
    SchemeGroup,
)

GROUP_SIZES = (32, 64, 128)
BLOCK = 128
_ELEMENTWISE = ("float-quantized", "naive-quantized", "int-quantized")
_FORMATS = (*_ELEMENTWISE, "pack-quantized", "mxfp4-pack-quantized", "mixed-precision")


def read_compressed_tensors(fields: Fields) -> QuantizationConfig | None:
    """None if only the KV cache is quantized. Raises ModelError, naming the field, for whatever is not supported."""
    if not fields.get("config_groups") and fields.get("kv_cache_scheme") is not None:
        return None
    file_format = fields.one_of("format", _FORMATS)
    fields.one_of("quantization_status", ("compressed", "frozen"), "compressed")  # "frozen": early versions
    _refuse_sparsity(fields)
    transform = fields.get("transform_config")
    if transform not in (None, {}) and transform != {"config_groups": {}}:
        raise fields.unsupported("transform_config", transform, "none")
    groups = fields.inner("config_groups")
    read = tuple(_read_group(groups.inner(name), file_format) for name in groups.names())
    if not read:
        raise fields.unsupported("config_groups", {}, "at least one group")
    return QuantizationConfig("compressed-tensors", read, read_layers(fields, "ignore"))


def _refuse_sparsity(fields: Fields) -> None:
    sparsity = fields.get("sparsity_config")
    if sparsity not in (None, {}):
        inner = fields.inner("sparsity_config")
        inner.one_of("format", ("dense",))


def _read_group(group: Fields, default_format: str) -> SchemeGroup:
    group.refuse("output_activations")
    weights = group.inner("weights")
    weights.refuse("dynamic")
    file_format = group.one_of("format", _FORMATS[:-1], default_format)
    if file_format == "pack-quantized":
        scheme: Scheme = _read_packed(group, weights)
    elif file_format == "mxfp4-pack-quantized":
        scheme = _read_mxfp4(group, weights)
    else:
        scheme = _read_elementwise(group, weights)
    return SchemeGroup(read_layers(group, "targets"), scheme)


def _read_elementwise(group: Fields, weights: Fields) -> Scheme:
    """One code for each element, stored with its own type."""
    weights.one_of("num_bits", (8,))
    weights.one_of("symmetric", (True,), True)
    kind = weights.one_of("type", ("float", "int"), "int")
    element = Element.FP8 if kind == "float" else Element.INT8
    strategies = ("tensor", "channel", "block") if element is Element.FP8 else ("tensor", "channel")
    strategy = weights.one_of("strategy", strategies, "tensor")
    if strategy == "block":
        return _read_blocks(group, weights)
    return ScaledScheme(element, strategy == "channel", _read_activations(group, kind))


def _read_blocks(group: Fields, weights: Fields) -> BlockFp8Scheme:
    block = weights.get("block_structure")
    if block not in ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"):
        raise weights.unsupported("block_structure", block, f"[{BLOCK}, {BLOCK}]")
    activations = _checked_activations(group, "float")
    activations.one_of("strategy", ("group",))
    activations.one_of("dynamic", (True,))
    activations.one_of("group_size", (BLOCK,))
    return BlockFp8Scheme((BLOCK, BLOCK))


def _checked_activations(group: Fields, kind: str) -> Fields:
    activations = group.inner("input_activations")
    activations.one_of("num_bits", (8,))
    activations.one_of("type", (kind,), "int")
    activations.one_of("symmetric", (True,), True)
    return activations


def _read_activations(group: Fields, kind: str) -> Activations:
    """A dynamic scale for a whole tensor becomes one for each token: see docs/quantization.md."""
    if group.get("input_activations") is None:
        return Activations.NONE
    activations = _checked_activations(group, kind)
    is_dynamic = activations.one_of("dynamic", (True, False), False)
    activations.one_of("strategy", ("tensor", "token") if is_dynamic else ("tensor",), "tensor")
    return Activations.TOKEN if is_dynamic else Activations.STATIC


def _read_packed(group: Fields, weights: Fields) -> GroupedIntScheme:
    if group.get("input_activations") is not None:
        raise group.unsupported("input_activations", group.get("input_activations"), "null beside packed integers")
    weights.one_of("type", ("int",), "int")
    num_bits = weights.one_of("num_bits", (4, 8))
    strategy = weights.one_of("strategy", ("group", "channel"))
    group_size = weights.one_of("group_size", GROUP_SIZES) if strategy == "group" else None
    is_symmetric = weights.one_of("symmetric", (True, False), True)
    order = weights.one_of("actorder", ("group", "weight", "static", "none", False), "none")
    return GroupedIntScheme(Packing.COMPRESSED_TENSORS, num_bits, group_size, is_symmetric, order == "group")


def _read_mxfp4(group: Fields, weights: Fields) -> Mxfp4Scheme:
    if group.get("input_activations") is not None:
        raise group.unsupported("input_activations", group.get("input_activations"), "null beside MXFP4")
    weights.one_of("type", ("float",))
    weights.one_of("num_bits", (4,))
    weights.one_of("group_size", (32,))
    return Mxfp4Scheme(is_compressed_tensors=True)
