"""The shape of a model, read once from a Hugging Face directory and used by both workers.

transformers parses config.json (old and new spellings, defaults). This module refuses every model that the workers
cannot compute exactly, before any weight is read. No object of transformers leaves this file.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from services.common.errors import ModelError
from services.common.quantization.read import MODELOPT_FILE, read_quantization
from services.common.quantization.schemes import QuantizationConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",  # and Qwen2.5
    "qwen3": "Qwen3ForCausalLM",
}
_DTYPES = ("float32", "bfloat16", "float16")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
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


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """All parameters of the rotary tables. A parameter that the rope_type does not have is `None`."""

    rope_type: str  # one of ROPE_TYPES
    theta: float
    rotary_dim: int  # equals head_dim in these families; there are rotary_dim // 2 frequencies
    max_position_embeddings: int
    factor: float = 1.0
    original_max_position_embeddings: int | None = None  # yarn, longrope, llama3
    attention_factor: float | None = None  # yarn, longrope; None: derived from the factor
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: whether the ramp starts and ends at whole dimensions
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    short_factor: tuple[float, ...] | None = None  # longrope, [rotary_dim // 2]
    long_factor: tuple[float, ...] | None = None  # longrope, [rotary_dim // 2]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes (in elements) and variants of a decoder-only model of a supported family."""

    family: str  # key of ARCHITECTURES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm of each q and k head after the projection
    sliding_windows: tuple[int | None, ...]  # per layer; token i sees token j iff 0 <= i - j < window
    max_position_embeddings: int
    rope: RopeConfig
    eos_token_ids: tuple[int, ...]  # any of these ends an answer; may be empty
    checkpoint_dtype: str  # element type of the unquantized weights in the files, as torch names it
    quantization: QuantizationConfig | None = None  # of the linear layers; only the dense worker needs it

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest of all fields but the quantization: equal in two processes that run the same model."""
        return hashlib.blake2b(repr(replace(self, quantization=None)).encode(), digest_size=16).hexdigest()

    @property
    def attn_size(self) -> int:
        """Width of all q heads, and of the attention output."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all k heads; the v heads are as wide."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Width of the merged projection: q heads, then k heads, then v heads."""
        return self.attn_size + 2 * self.kv_size


def load_model_config(path: Path, num_layers: int | None = None) -> ModelConfig:
    """Reads `path`/config.json (and generation_config.json, if it exists) without network access.

    `num_layers` keeps only this many first layers. Raises `ModelError` for a missing, broken, contradictory or
    unsupported config; the message names the value and the supported ones.
    """
    if not path.is_dir():
        raise ModelError(f"model directory {path} does not exist or is not a directory")
    raw = _read_json(path / "config.json")
    if raw is None:
        raise ModelError(f"model directory {path} has no config.json")
    _check_supported(raw, path)
    hf = _parse(raw, path)
    _check_shapes(hf, path)
    num_file_layers = hf.num_hidden_layers
    if num_layers is None:
        num_layers = num_file_layers
    elif not 1 <= num_layers <= num_file_layers:
        raise ModelError(f"num_layers is {num_layers}, the model in {path} allows 1 to {num_file_layers}")
    family = hf.model_type
    attention_bias = bool(getattr(hf, "attention_bias", False))  # an attribute of Llama and Qwen3 only
    head_dim = _head_dim(hf)
    return ModelConfig(
        family=family,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=num_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=float(hf.rms_norm_eps),
        tie_word_embeddings=bool(hf.tie_word_embeddings),
        qkv_bias=family == "qwen2" or (family in ("llama", "qwen3") and attention_bias),
        o_bias=family in ("llama", "qwen3") and attention_bias,
        mlp_bias=family == "llama" and bool(hf.mlp_bias),
        qk_norm=family == "qwen3",
        sliding_windows=_sliding_windows(hf, path)[:num_layers],
        max_position_embeddings=hf.max_position_embeddings,
        rope=_rope_config(hf, head_dim, path),
        eos_token_ids=_eos_token_ids(hf, path),
        checkpoint_dtype=_checkpoint_dtype(hf, path),
        quantization=read_quantization(str(path), raw.get("quantization_config"), _read_json(path / MODELOPT_FILE)),
    )


def _read_json(file: Path) -> dict[str, Any] | None:
    """The JSON object in `file`, or None if the file does not exist."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds a JSON {type(value).__name__}, expected an object")
    return value


def _check_supported(raw: dict[str, Any], path: Path) -> None:
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        raise ModelError(f"{path} has model_type {family!r}, supported: {', '.join(ARCHITECTURES)}")
    architectures = raw.get("architectures")
    if architectures and ARCHITECTURES[family] not in architectures:
        raise ModelError(f"{path} has architectures {architectures}, supported: {', '.join(ARCHITECTURES.values())}")
    for name in _SIZES:
        size = raw.get(name)
        if size is not None and (type(size) is not int or size < 1):
            raise ModelError(f"{path} has {name} {size!r}, expected a whole number of at least 1")


def _parse(raw: dict[str, Any], path: Path) -> PretrainedConfig:
    try:
        hf = AutoConfig.for_model(**raw)
        hf.standardize_rope_params()  # as Hugging Face's models do; reads an original length beside rope_parameters
        return hf
    except (StrictDataclassError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{path} has no valid {raw['model_type']} config.json: {error}") from error


def _checkpoint_dtype(hf: PretrainedConfig, path: Path) -> str:
    name = str(hf.dtype or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelError(f"{path} has dtype {name!r}, supported: {', '.join(_DTYPES)}")
    return name


def _check_shapes(hf: PretrainedConfig, path: Path) -> None:
    """Refuses shapes and activations that transformers accepts but the workers cannot compute."""
    num_heads, num_kv_heads, head_dim = hf.num_attention_heads, hf.num_key_value_heads, _head_dim(hf)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{path} has num_attention_heads {num_heads}, expected a multiple of its num_key_value_heads {num_kv_heads}"
        )
    if head_dim < 2 or head_dim % 2:
        raise ModelError(f"{path} has head_dim {head_dim}, expected an even number of at least 2")
    if hf.hidden_act != "silu":
        raise ModelError(f"{path} has hidden_act {hf.hidden_act!r}, supported: silu")
    if not (math.isfinite(hf.rms_norm_eps) and hf.rms_norm_eps >= 0):
        raise ModelError(f"{path} has rms_norm_eps {hf.rms_norm_eps}, expected a finite number of at least 0")


def _head_dim(hf: PretrainedConfig) -> int:
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def _sliding_windows(hf: PretrainedConfig, path: Path) -> tuple[int | None, ...]:
    """The window of each layer: Mistral has one window for all, Qwen names its sliding layers, Llama has none."""
    if hf.model_type == "llama":
        return (None,) * hf.num_hidden_layers
    window = hf.sliding_window
    if window is not None and window < 1:
        raise ModelError(f"{path} has sliding_window {window}, expected at least 1")
    if hf.model_type == "mistral":
        return (window,) * hf.num_hidden_layers
    unsupported = set(hf.layer_types) - {"full_attention", "sliding_attention"}
    if unsupported:
        raise ModelError(f"{path} has layer_types {sorted(unsupported)}, supported: full_attention, sliding_attention")
    if window is None and "sliding_attention" in hf.layer_types:
        raise ModelError(f"{path} has layers of type sliding_attention but use_sliding_window is off")
    return tuple(window if kind == "sliding_attention" else None for kind in hf.layer_types)


def _rope_config(hf: PretrainedConfig, head_dim: int, path: Path) -> RopeConfig:
    parameters: dict[str, Any] = hf.rope_parameters
    rope_type = parameters.get("rope_type")
    if rope_type not in ROPE_TYPES:
        raise ModelError(f"{path} has rope_type {rope_type!r}, supported: {', '.join(ROPE_TYPES)}")
    rotary_factor = parameters.get("partial_rotary_factor", 1.0)
    if rotary_factor != 1.0:
        raise ModelError(f"{path} has partial_rotary_factor {rotary_factor}, supported: 1.0")

    def number(name: str, default: float | None = None) -> float | None:
        value = parameters.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ModelError(f"{path} has rope parameter {name} {value!r}, expected a number above 0")
        return value

    def factors(name: str) -> tuple[float, ...] | None:
        if rope_type != "longrope":
            return None
        values = parameters.get(name)
        is_list = isinstance(values, list) and len(values) == head_dim // 2
        if not is_list or not all(type(value) in (int, float) and 0 < value < math.inf for value in values):
            raise ModelError(f"{path} has rope parameter {name} {values!r}, expected {head_dim // 2} numbers above 0")
        return tuple(float(value) for value in values)

    theta = number("rope_theta")
    if theta is None:
        raise ModelError(f"{path} has no rope_theta")
    original = number("original_max_position_embeddings")
    if original is None and rope_type in ("yarn", "longrope", "llama3"):
        raise ModelError(f"{path} has rope_type {rope_type!r} and no original_max_position_embeddings")
    implied_factor = 1.0 if original is None else hf.max_position_embeddings / original
    low, high = number("low_freq_factor"), number("high_freq_factor")
    if rope_type == "llama3" and not (low and high and low < high):
        raise ModelError(f"{path} has low_freq_factor {low} and high_freq_factor {high}, expected low < high")
    return RopeConfig(
        rope_type=rope_type,
        theta=float(theta),
        rotary_dim=head_dim,
        max_position_embeddings=hf.max_position_embeddings,
        factor=float(number("factor", implied_factor)),
        original_max_position_embeddings=original,
        attention_factor=number("attention_factor"),
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        mscale=number("mscale"),
        mscale_all_dim=number("mscale_all_dim"),
        truncate=bool(parameters.get("truncate", True)),
        low_freq_factor=low,
        high_freq_factor=high,
        short_factor=factors("short_factor"),
        long_factor=factors("long_factor"),
    )


def _eos_token_ids(hf: PretrainedConfig, path: Path) -> tuple[int, ...]:
    """The ids in generation_config.json, as in Hugging Face `generate`; if it has none, those in config.json."""
    generation = _read_json(path / "generation_config.json") or {}
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = hf.eos_token_id
    if eos is None:
        return ()
    token_ids = eos if isinstance(eos, list) else [eos]
    if any(type(token_id) is not int for token_id in token_ids):
        raise ModelError(f"{path} has eos_token_id {eos!r}, expected a token id or a list of them")
    return tuple(token_id for token_id in token_ids if token_id >= 0)  # -1 means none
