"""Reads the shape of a model from a Hugging Face directory. Both workers use it.

transformers parses config.json (old and new spellings, defaults), and the model's family reads the result
(`services/common/families/registry.py`). Every model that the workers cannot compute exactly is refused before any
weight is read. No object of transformers leaves these files.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.common.errors import ModelError
from services.common.families.fields import ConfigFields
from services.common.families.registry import FAMILIES, FLAT_TEXT_PARTS, READS_PICTURES, SEES_SPANS, TEXT_PARTS
from services.common.families.shape import AttentionOptions, LayerHeads, LayerParts, ModelConfig, RopeConfig
from services.common.families.without_class import WITHOUT_CLASS
from services.common.hf_config import is_hf_type, parse_hf_config
from services.common.json_files.fields import Fields
from services.common.json_files.read_json import read_json
from services.common.pooling.architectures import has_language_head
from services.common.quantization.read import MODELOPT_FILE, read_quantization
from services.common.vision.vision_config import load_vision_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["AttentionOptions", "LayerHeads", "LayerParts", "ModelConfig", "RopeConfig", "load_model_config"]

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
# The classes of a family's models that generate nothing, by what stands in the place of the language head.
_BASE = re.compile("(ForCausalLM|LMHeadModel)$")
_WITHOUT_HEAD = ("Model", "ForSequenceClassification", "ForTokenClassification")


def load_model_config(path: Path, num_layers: int | None = None) -> ModelConfig:
    """Reads `path`/config.json (and generation_config.json, if it exists) without network access.

    `num_layers` keeps only this many first layers. Raises `ModelError` for a missing, broken, contradictory or
    unsupported config, also for a field that is not understood and may change the computation; the message names
    the value and the supported ones.
    """
    if not path.is_dir():
        raise ModelError(f"model directory {path} does not exist or is not a directory")
    raw = read_json(path / "config.json")
    if raw is None:
        raise ModelError(f"model directory {path} has no config.json")
    _check_supported(raw, path)
    quantization = read_quantization(str(path), raw.get("quantization_config"), read_json(path / MODELOPT_FILE))
    config = replace(read_model_config(_text_part(raw, path), path), quantization=quantization)
    if raw["model_type"] in TEXT_PARTS and config.encoder is not None:
        if raw["model_type"] not in READS_PICTURES:
            raise ModelError(f"{path} has model_type {raw['model_type']!r} and a text_config of {config.family!r}")
        config = replace(config, encoder=replace(config.encoder, pictures=load_vision_config(path)))
    if raw["model_type"] in SEES_SPANS:
        config = replace(config, attention=replace(config.attention, sees_spans=True))
    if num_layers is not None:
        config = _first_layers(config, num_layers, path)
    return config


def read_model_config(raw: dict[str, Any], path: Path) -> ModelConfig:
    """What the JSON object `raw` of a file in `path` says of a model of text, without its quantization.

    Raises `ModelError` as `load_model_config` does.
    """
    _check_supported(raw, path)
    has_head = has_language_head(raw)
    name = raw["model_type"]
    family = FAMILIES[name]
    if family.translate is not None:
        raw = family.translate(raw)
    fields = ConfigFields(name, raw, _parse(raw, path), path)
    config = family.read(fields)
    fields.check_all_understood()
    # Where there is no language head, the embedding stands in for it, and nobody sees what it gives.
    return config if has_head else replace(config, tie_word_embeddings=True)


def _check_supported(raw: dict[str, Any], path: Path) -> None:
    family = raw.get("model_type")
    by_family = {name: each.architecture for name, each in FAMILIES.items()} | TEXT_PARTS
    if not isinstance(family, str) or family not in by_family:
        has_class = not isinstance(family, str) or is_hf_type(family)
        reason = f"supported: {', '.join(by_family)}" if has_class else WITHOUT_CLASS
        raise ModelError(f"{path} has model_type {family!r}, {reason}")
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list):
        raise ModelError(f"{path} has architectures {architectures!r}, expected a list of names")
    spellings = {str(name).casefold() for name in architectures}  # MPT's files say MPTForCausalLM
    others = FAMILIES[family].other_architectures if family in FAMILIES else ()
    supported = [by_family[family], *(_BASE.sub(each, by_family[family]) for each in _WITHOUT_HEAD)]
    if spellings and not spellings & {each.casefold() for each in (*supported, *others)}:
        names = ", ".join(dict.fromkeys(supported))
        raise ModelError(f"{path} has architectures {architectures}, supported for {family!r}: {names}")
    fields = Fields(raw, str(path))
    for name in _SIZES:
        if fields.get(name) is not None:
            fields.size(name)


def _text_part(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """The config of the text part of a model of text and images; any other config as it is."""
    if raw["model_type"] not in TEXT_PARTS:
        return raw
    text = raw.get("text_config")
    if text is None and raw["model_type"] in FLAT_TEXT_PARTS:
        text = {name: value for name, value in raw.items() if name not in ("vision_config", "auto_map")}
        text["model_type"] = f"{raw['model_type']}_text"
    if not isinstance(text, dict):
        raise ModelError(f"{path} has model_type {raw['model_type']!r} and text_config {text!r}, expected an object")
    names = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")
    around = {name: raw[name] for name in names if raw.get(name) is not None}
    return around | {name: value for name, value in text.items() if name != "architectures"}


def _parse(raw: dict[str, Any], path: Path) -> PretrainedConfig:
    try:
        return parse_hf_config(_with_infinities(raw), standardizes_rope=True)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ModelError(f"{path} has no valid {raw['model_type']} config.json: {error}") from error


def _with_infinities(value: Any) -> Any:
    """A JSON value with the numbers that JSON lacks, which transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {name: _with_infinities(each) for name, each in value.items()}
    return [_with_infinities(each) for each in value] if isinstance(value, list) else value


def _first_layers(config: ModelConfig, num_layers: int, path: Path) -> ModelConfig:
    if config.encoder is not None:
        raise ModelError(f"num_layers is {num_layers}, the model in {path} has an encoder and runs with all layers")
    if not 1 <= num_layers <= config.num_layers:
        raise ModelError(f"num_layers is {num_layers}, the model in {path} allows 1 to {config.num_layers}")
    options = config.attention
    attention = replace(
        options, layer_ropes=options.layer_ropes[:num_layers], layer_heads=options.layer_heads[:num_layers]
    )
    windows = config.sliding_windows[:num_layers]
    return replace(config, num_layers=num_layers, sliding_windows=windows, attention=attention)
