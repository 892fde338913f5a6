"""Reads PEFT checkpoints of prompt tuning: the embeddings of virtual tokens, which stand before every prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.common.errors import InvalidRequest
from services.common.shorten import show
from services.lora.adapter_config import PROMPT_TUNING, read_object
from services.lora.prompt_embeds import PromptEmbeds, make_prompt_embeds
from services.lora.safetensors_file import SafetensorsFile

MAX_VIRTUAL_TOKENS = 8192
TENSOR = "prompt_embeddings"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_virtual_tokens(config: bytes, weights_file: Path, hidden_size: int) -> PromptEmbeds | None:
    """The virtual tokens of an adapter, whose adapter_config.json is `config`; None if it is of another kind.

    hidden_size: the served model's. Raises `InvalidRequest`, naming what is wrong.
    """
    raw = read_object(config)
    if raw.get("peft_type") not in PROMPT_TUNING:
        return None
    num_tokens = _read_num_tokens(raw)
    with SafetensorsFile(weights_file) as file:
        if list(file.entries) != [TENSOR]:
            raise InvalidRequest(f"{weights_file.name} has {show(sorted(file.entries))}, expected {show([TENSOR])}")
        entry = file.entries[TENSOR]
        if entry.shape != (num_tokens, hidden_size):
            raise InvalidRequest(
                f"{TENSOR} in {weights_file.name} has shape {list(entry.shape)}, num_virtual_tokens and the served"
                f" model's hidden size call for {[num_tokens, hidden_size]}"
            )
        values = file.read(TENSOR).tobytes()
    return make_prompt_embeds(values, num_tokens, hidden_size, _DTYPES[entry.dtype], TENSOR)


def _read_num_tokens(raw: dict[str, Any]) -> int:
    for name, supported in (("task_type", (None, "CAUSAL_LM")), ("num_transformer_submodules", (None, 1))):
        if raw.get(name) not in supported:
            raise InvalidRequest(f"adapter_config.json has {name} {show(raw[name])}, supported: {supported[1]!r}")
    if raw.get("modules_to_save"):
        raise InvalidRequest(f"adapter_config.json has modules_to_save {show(raw['modules_to_save'])}: not supported")
    value = raw.get("num_virtual_tokens")
    if type(value) is not int or not 1 <= value <= MAX_VIRTUAL_TOKENS:
        raise InvalidRequest(
            f"adapter_config.json has num_virtual_tokens {show(value)}, must be from 1 to {MAX_VIRTUAL_TOKENS}"
        )
    return value
