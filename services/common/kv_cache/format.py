"""The format of the KV cache, which config and checkpoint decide together. Both workers resolve it in the same way."""

from __future__ import annotations

from typing import Literal

from services.common.config import AttentionSection
from services.common.errors import ConfigError
from services.common.kv_cache.scheme import FP8_SCHEME
from services.common.rank import Rank
from services.common.resolve import ResolvedModel

KVCacheFormat = Literal["model", "fp8", "int8"]


def with_own_layers(section: AttentionSection, model: ResolvedModel, rank: Rank) -> AttentionSection:
    """The section of a rank, which counts its own layers. `model`: the whole one, which a user means.

    Raises as `resolve_kv_cache_format`.
    """
    resolve_kv_cache_format(section, model)
    own = rank.layers(model.config.num_layers)
    skipped = tuple(layer - own.start for layer in section.kv_cache_skip_layers if layer in own)
    return section.model_copy(update={"kv_cache_skip_layers": skipped})


def resolve_kv_cache_format(section: AttentionSection, model: ResolvedModel) -> KVCacheFormat:
    """The format of `attention.kv_cache_dtype`; `auto` is what the checkpoint asks for, else the model's dtype.

    Raises ConfigError if the checkpoint asks for something else than FP8, if 8 bits are asked for and the model has
    latent vectors or recurrent layers, or if `attention.kv_cache_skip_layers` names a layer that the model does not
    have.
    """
    num_layers = model.config.num_layers
    for layer in section.kv_cache_skip_layers:
        if layer >= num_layers:
            raise ConfigError(
                f"attention.kv_cache_skip_layers names layer {layer}, the model has layers 0 to {num_layers - 1}"
            )
    lack = None  # what a cache of 8 bits is not made for
    if model.config.attention.value_dim is not None:
        lack = "latent vectors"
    elif model.config.recurrent_layers:
        lack = "keys and values beside recurrent layers"
    elif model.config.encoder is not None:
        lack = "keys and values beside cross attention"
    if section.kv_cache_dtype != "auto":
        if lack is not None and section.kv_cache_dtype != "model":
            raise ConfigError(
                f"attention.kv_cache_dtype is {section.kv_cache_dtype!r}, but the {lack} of"
                f" {model.config.family!r} are stored in the model's dtype only: set it to model"
            )
        return section.kv_cache_dtype
    scheme = model.kv_cache_scheme
    if scheme is None:
        return "model"
    if lack is not None:
        raise ConfigError(
            f"attention.kv_cache_dtype is 'auto', and the checkpoint's scheme of the KV cache is {scheme}, but the"
            f" {lack} of {model.config.family!r} are stored in the model's dtype only: set it to model"
        )
    if scheme != FP8_SCHEME:
        raise ConfigError(
            f"attention.kv_cache_dtype is 'auto', and the checkpoint's scheme of the KV cache is {scheme}; supported:"
            " 8-bit floats with one static scale per tensor. Set attention.kv_cache_dtype to model, fp8 or int8"
        )
    return "fp8"
