"""Reads the parameters of rotary embeddings, for every kind of scaling that transformers has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.common.families.fields import ConfigFields
from services.common.families.shape import RopeConfig
from services.common.json_files.fields import Fields

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


def read_rope(fields: ConfigFields, head_dim: int, *, allows_partial: bool = False) -> RopeConfig:
    """The one rotary embedding of a model; `allows_partial`: it may turn only the first dimensions of each head."""
    fields.ignore("rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    return parse_rope(fields, fields["rope_parameters"], head_dim, allows_partial=allows_partial)


def no_rope(head_dim: int, num_positions: int) -> RopeConfig:
    """Stands in `ModelConfig.rope` of a model that never rotates; its `layer_ropes` are all None."""
    return RopeConfig("default", 1e4, head_dim, num_positions)


def read_ropes_by_type(fields: ConfigFields, head_dims: Mapping[str, int]) -> dict[str, RopeConfig]:
    """The rotary embedding of each of the config's `layer_types`; `head_dims` has the size of their heads."""
    fields.ignore("rope_scaling", "rope_theta", "rope_local_base_freq")
    by_type = Fields(fields["rope_parameters"], f"{fields.path}: rope_parameters")
    kinds = sorted(set(fields["layer_types"]))
    return {kind: parse_rope(fields, by_type.inner(kind).raw, head_dims[kind]) for kind in kinds}


def parse_rope(
    fields: ConfigFields, parameters: Mapping[str, Any], head_dim: int, *, allows_partial: bool = False
) -> RopeConfig:
    """One rotary embedding from transformers' `rope_parameters`."""
    max_position_embeddings = fields.size("max_position_embeddings")
    rope_type = parameters.get("rope_type")
    if rope_type not in ROPE_TYPES:
        raise fields.error("rope_type", rope_type, f"supported: {', '.join(ROPE_TYPES)}")
    part, num_turning = parameters.get("partial_rotary_factor", 1.0), None
    if rope_type == "proportional":  # pairs are half a head apart, and the part that does not turn has the frequency 0
        num_turning, part = _rotary_dim(fields, part, head_dim, allows_partial=True) // 2, 1.0
    rotary_dim = _rotary_dim(fields, part, head_dim, allows_partial)

    def number(name: str, default: float | None = None) -> float | None:
        value = parameters.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise fields.error(f"rope parameter {name}", value, "expected a number above 0")
        return value

    def factors(name: str) -> tuple[float, ...] | None:
        if rope_type != "longrope":
            return None
        values, count = parameters.get(name), rotary_dim // 2
        is_list = isinstance(values, list) and len(values) == count
        if not is_list or not all(type(value) in (int, float) and 0 < value < math.inf for value in values):
            raise fields.error(f"rope parameter {name}", values, f"expected {count} numbers above 0")
        return tuple(float(value) for value in values)

    theta = number("rope_theta")
    if theta is None or theta <= 1:
        raise fields.error("rope_theta", theta, "expected a number above 1")
    original = number("original_max_position_embeddings")
    if original is not None and original <= 1:
        raise fields.error("original_max_position_embeddings", original, "expected a number above 1")
    if original is None and rope_type in ("yarn", "longrope", "llama3"):
        raise fields.error("rope_type", rope_type, "and no original_max_position_embeddings")
    if rope_type == "dynamic" and rotary_dim < 4:
        raise fields.error("rope_type", rope_type, f"and {rotary_dim} rotated dimensions, expected at least 4")
    implied_factor = 1.0 if original is None else max_position_embeddings / original
    low, high = number("low_freq_factor"), number("high_freq_factor")
    if rope_type == "llama3" and not (low and high and low < high):
        raise fields.error("low_freq_factor", low, f"and high_freq_factor {high}, expected low < high")
    if parameters.get("llama_4_scaling_beta"):
        raise fields.error("llama_4_scaling_beta", parameters["llama_4_scaling_beta"], "supported: none")
    return RopeConfig(
        rope_type=rope_type,
        theta=float(theta),
        rotary_dim=rotary_dim,
        max_position_embeddings=max_position_embeddings,
        factor=float(number("factor", implied_factor)),
        original_max_position_embeddings=original,
        attention_factor=number("attention_factor"),
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        mscale=number("mscale"),
        mscale_all_dim=number("mscale_all_dim"),
        truncate=bool(parameters.get("truncate", True)),
        num_turning=num_turning,
        low_freq_factor=low,
        high_freq_factor=high,
        short_factor=factors("short_factor"),
        long_factor=factors("long_factor"),
    )


def with_axes(fields: ConfigFields, rope: RopeConfig) -> RopeConfig:
    """The rotary embedding on three axes: sections of its pairs turn by time, row and column (arXiv:2409.12191)."""
    sections, num_pairs = fields["rope_parameters"].get("mrope_section"), rope.rotary_dim // 2
    is_list = isinstance(sections, list) and len(sections) == 3 and all(type(each) is int for each in sections)
    if not is_list or min(sections) < 0 or sum(sections) != num_pairs:
        raise fields.error("rope parameter mrope_section", sections, f"expected three numbers whose sum is {num_pairs}")
    if not fields["rope_parameters"].get("mrope_interleaved"):
        return replace(rope, axes=tuple(axis for axis, size in enumerate(sections) for _ in range(size)))
    # Pairs take turns, time first; when a section is used up, time has its turns.
    turns = ((pair, pair % 3) for pair in range(num_pairs))
    return replace(rope, axes=tuple(axis if pair < 3 * sections[axis] else 0 for pair, axis in turns))


def _rotary_dim(fields: ConfigFields, factor: Any, head_dim: int, allows_partial: bool) -> int:
    """The number of rotated dimensions: an even part of the head."""
    if factor == 1.0:
        return head_dim
    if not allows_partial:
        raise fields.error("partial_rotary_factor", factor, "supported: 1.0")
    rotary_dim = int(head_dim * factor) if isinstance(factor, int | float) and 0 < factor < 1 else 0
    if rotary_dim < 2 or rotary_dim % 2:
        wanted = f"expected an even number of rotated dimensions of the head's {head_dim}"
        raise fields.error("partial_rotary_factor", factor, wanted)
    return rotary_dim
