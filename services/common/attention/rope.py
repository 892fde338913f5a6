"""Rotary position embedding: cosines and sines per token, for every kind of scaling that the model families use.

Used once per step. The formulas agree with those of transformers (tested).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from services.common.model_config import RopeConfig


def length_dependent_beyond(rope: RopeConfig) -> int | None:
    """The sequence length above which a token's rotation also depends on that length; None: it never does."""
    if rope.rope_type == "dynamic":
        return rope.max_position_embeddings
    return rope.original_max_position_embeddings if rope.rope_type == "longrope" else None


class RotaryEmbedding:
    """Gives cos and sin by position and by rope_len, the length that "dynamic" and "longrope" scaling depend on.

    It keeps float32 tables on `device` for positions below `max_model_len`. For dynamic scaling it keeps a table of
    frequencies by length instead, because a table of angles by length and position would grow quadratically.
    """

    def __init__(self, rope: RopeConfig, max_model_len: int, device: torch.device) -> None:
        self._scale = attention_scale(rope)
        self._axes = rope.axes
        self._beyond = length_dependent_beyond(rope)
        self._max_model_len = max_model_len
        self._is_dynamic = rope.rope_type == "dynamic"
        if self._is_dynamic:
            lengths = torch.arange(self._beyond, max(self._beyond, max_model_len) + 1)
            self._frequencies = inverse_frequencies(rope, lengths).to(device)
        else:
            lengths = torch.tensor([0] if self._beyond is None else [self._beyond, self._beyond + 1])
            positions = torch.arange(max_model_len, dtype=torch.float32)[None, :, None]
            angles = (positions * inverse_frequencies(rope, lengths)[:, None, :]).flatten(0, 1)
            # [len(lengths) * max_model_len, rotary_dim / 2]
            self._cos = (angles.cos() * self._scale).to(device)
            self._sin = (angles.sin() * self._scale).to(device)

    def __call__(self, positions: torch.Tensor, rope_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin float32 [num_tokens, rotary_dim / 2] for int64 positions and rope_lens [num_tokens].

        positions may be [3, num_tokens] for an embedding with axes: each pair turns by one of the three.
        """
        if positions.dim() == 2:
            found = [self(axis, rope_lens) for axis in positions]
            return tuple(select_axes(torch.stack(each), self._axes) for each in zip(*found, strict=True))
        if self._is_dynamic:
            angles = positions[:, None].float() * self._frequencies[(rope_lens - self._beyond).clamp(min=0)]
            return angles.cos() * self._scale, angles.sin() * self._scale
        if self._beyond is not None:
            positions = positions + (rope_lens > self._beyond) * self._max_model_len
        return self._cos[positions], self._sin[positions]


def select_axes(values: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """values [3, num_tokens, num_pairs] -> [num_tokens, num_pairs], for each pair that of its axis."""
    pairs = torch.arange(values.shape[2], device=values.device)
    return values[torch.tensor(axes, device=values.device), :, pairs].T


class UnboundedRotaryEmbedding:
    """Gives cos and sin at any position, without tables, for rotations that do not depend on the length.

    Angles are computed in float64: at great positions float32 has no digits left for the fractions of a turn. Then the
    product of a query and a key depends on their distance alone.
    """

    def __init__(self, rope: RopeConfig, device: torch.device) -> None:
        assert length_dependent_beyond(rope) is None
        self._scale = attention_scale(rope)
        self._frequencies = inverse_frequencies(rope, torch.tensor([0]))[0].double().to(device)

    def __call__(self, positions: torch.Tensor, rope_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin float32 [num_tokens, rotary_dim / 2] for int64 positions [num_tokens]; `rope_lens` do not matter."""
        angles = positions[:, None].double() * self._frequencies
        return (angles.cos() * self._scale).float(), (angles.sin() * self._scale).float()


def inverse_frequencies(rope: RopeConfig, lengths: torch.Tensor) -> torch.Tensor:
    """Angle per position, float32 [len(lengths), rotary_dim / 2], in sequences of `lengths` tokens.

    Rows differ only for the rope types "dynamic" and "longrope". Sources: RoPE, arXiv:2104.09864; linear,
    arXiv:2306.15595; dynamic (NTK-aware) and yarn, arXiv:2309.00071; longrope, arXiv:2402.13753; llama3: the
    Llama 3.1 release; proportional: transformers' Gemma 4.
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    periods = rope.theta**exponents  # positions per radian
    lengths = lengths[:, None]
    if rope.rope_type == "dynamic":
        growth = rope.factor * lengths / rope.max_position_embeddings - (rope.factor - 1)
        thetas = rope.theta * growth ** (rope.rotary_dim / (rope.rotary_dim - 2))
        periods = torch.where(lengths > rope.max_position_embeddings, thetas**exponents, periods)
    elif rope.rope_type == "longrope":
        short, long = torch.tensor(rope.short_factor), torch.tensor(rope.long_factor)
        periods = periods * torch.where(lengths > rope.original_max_position_embeddings, long, short)
    frequencies = 1.0 / periods
    if rope.rope_type == "linear":
        frequencies = frequencies / rope.factor
    elif rope.rope_type == "proportional":
        frequencies = frequencies / rope.factor
        frequencies[..., rope.num_turning :] = 0.0
    elif rope.rope_type == "yarn":
        kept = _yarn_kept_fraction(rope)
        frequencies = (1 - kept) / (rope.factor * periods) + kept * frequencies
    elif rope.rope_type == "llama3":
        kept = _llama3_kept_fraction(rope, frequencies)
        frequencies = (1 - kept) * frequencies / rope.factor + kept * frequencies
    return frequencies.expand(len(lengths), -1)


def attention_scale(rope: RopeConfig) -> float:
    """The factor of cos and sin that keeps attention as sharp at the extended length."""
    if rope.attention_factor is not None and rope.rope_type in ("yarn", "longrope"):
        return rope.attention_factor
    if rope.factor <= 1:
        return 1.0
    if rope.rope_type == "longrope":
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings))
    if rope.rope_type == "yarn":
        slope = 0.1 * math.log(rope.factor)
        if rope.mscale and rope.mscale_all_dim:
            return (slope * rope.mscale + 1) / (slope * rope.mscale_all_dim + 1)
        return slope + 1
    return 1.0


def _yarn_kept_fraction(rope: RopeConfig) -> torch.Tensor:
    """float32 [rotary_dim / 2]: 1 where a dimension turns often in the original length, 0 where seldom."""

    def dimension_of(num_rotations: float) -> float:
        period = rope.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(period) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = high - low or 0.001  # a step instead of a ramp
    return 1 - ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)


def _llama3_kept_fraction(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """float32 [rotary_dim / 2]: 1 for short wavelengths, 0 for long ones, a ramp over rotations between."""
    num_rotations = rope.original_max_position_embeddings / (2 * math.pi / frequencies)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    return ((num_rotations - low) / (high - low)).clamp(0, 1)
