"""Cohere's Command-R (1 and 2): parallel residual, LayerNorm without bias, scaled logits."""

from __future__ import annotations

from dataclasses import replace

from services.common.families.base import read_base, read_window, windows_of_layers
from services.common.families.fields import ConfigFields
from services.common.families.shape import AttentionOptions, ModelConfig, NormKind, QkNormKind, ResidualKind


def read_cohere(fields: ConfigFields) -> ModelConfig:
    """Command-R and Command-R+, whose heads have norms with weights of their own."""
    config = read_base(fields, eps="layer_norm_eps")
    has_bias = fields.flag("attention_bias")
    parts = replace(
        config.parts,
        norm=NormKind.LAYER_NO_BIAS,
        residual=ResidualKind.PARALLEL,
        shares_norm=True,
        qk_norm=QkNormKind.OWN_HEADS,
        logit_multiplier=fields.number("logit_scale", 1.0),
    )
    return replace(
        config,
        parts=parts,
        qkv_bias=has_bias,
        o_bias=has_bias,
        qk_norm=fields.flag("use_qk_norm"),
        attention=AttentionOptions(rotates_pairs=True),
    )


def read_cohere2(fields: ConfigFields) -> ModelConfig:
    """Command-R7B and Command-A: layers with a window rotate, the others see everything and do not."""
    config = read_cohere(fields)
    windows = windows_of_layers(fields, read_window(fields))
    ropes = tuple(None if window is None else config.rope for window in windows)
    return replace(config, sliding_windows=windows, attention=replace(config.attention, layer_ropes=ropes))
