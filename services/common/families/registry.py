"""`FAMILIES`: the model types that are served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.common.families.fields import ConfigFields
from services.common.families.llama import (
    read_granite,
    read_llama,
    read_mistral,
    read_qwen2,
    read_qwen3,
    read_smollm3,
)
from services.common.families.shape import ModelConfig


@dataclass(frozen=True, slots=True)
class Family:
    """How a family is recognised and read."""

    architecture: str  # transformers' class, named in config.json
    read: Callable[[ConfigFields], ModelConfig]  # raises ModelError for what the workers cannot compute


FAMILIES: dict[str, Family] = {  # by model_type
    "llama": Family("LlamaForCausalLM", read_llama),
    "mistral": Family("MistralForCausalLM", read_mistral),
    "qwen2": Family("Qwen2ForCausalLM", read_qwen2),
    "qwen3": Family("Qwen3ForCausalLM", read_qwen3),
    "smollm3": Family("SmolLM3ForCausalLM", read_smollm3),
    "granite": Family("GraniteForCausalLM", read_granite),
}

# Models of text and images, of which the text part is served: the architecture, by model_type.
TEXT_PARTS: dict[str, str] = {
    "mistral3": "Mistral3ForConditionalGeneration",
}
