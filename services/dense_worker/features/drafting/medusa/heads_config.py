"""`HeadsConfig`: the config.json of Medusa heads, as FasterDecoding and vLLM write it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.common.errors import ModelError
from services.common.json_files.fields import Fields
from services.common.json_files.read_json import read_json
from services.common.model_config import ModelConfig

MAX_HEADS = 64  # as many as a step may have drafts of a sequence
MAX_BLOCKS = 16  # of one head; published heads have one


@dataclass(frozen=True, slots=True)
class HeadsConfig:
    """What config.json says of the heads."""

    num_heads: int
    num_blocks: int  # of each head
    has_shared_lm_head: bool  # whether the first head's lm_head is that of all heads


def read_heads_config(path: Path, model: ModelConfig) -> HeadsConfig:
    """Reads config.json in the directory `path`, with the fields of FasterDecoding or of vLLM.

    Raises `ModelError`, naming value and limit, if it is not one of Medusa heads, or of another model's.
    """
    file = path / "config.json"
    values = read_json(file)
    if values is None:
        raise ModelError(f"{file} is missing")
    fields = Fields(values, str(file))
    heads = fields.first_of("medusa_num_heads", "num_heads")
    blocks = fields.first_of("medusa_num_layers", "num_hidden_layers")
    for name, expected in (("hidden_size", model.hidden_size), ("vocab_size", model.vocab_size)):
        if fields.get(name, expected) != expected:
            raise fields.error(name, fields.get(name), f"the model's is {expected}")
    if fields.get("truncated_vocab_size", model.vocab_size) != model.vocab_size:
        value = fields.get("truncated_vocab_size")
        raise fields.unsupported("truncated_vocab_size", value, f"heads for the whole vocabulary of {model.vocab_size}")
    return HeadsConfig(
        _count(fields, heads, None, MAX_HEADS),
        _count(fields, blocks, 1, MAX_BLOCKS),
        fields.one_of("original_lm_head", (False, True), False),
    )


def _count(fields: Fields, name: str, default: int | None, most: int) -> int:
    value = fields.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise fields.error(name, value, f"expected an integer from 1 to {most}")
    return value
