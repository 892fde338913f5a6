"""`Adapter`: the identity of an adapter. That of a LoRA adapter travels with every sequence that uses it."""

from __future__ import annotations

from dataclasses import dataclass

from services.lora.prompt_embeds import PromptEmbeds
from services.pb import adapter_pb2


@dataclass(frozen=True, slots=True)
class Adapter:
    """Deltas of linear layers, or virtual tokens. Equal hashes mean equal tensors and scales, whatever the names."""

    name: str  # for messages and logs
    hash: str  # of its tensors and scales, hexadecimal
    path: str  # absolute directory of its checkpoint
    table: PromptEmbeds | None = None  # its virtual tokens, which gateways send with the prompts; None: it is LoRA


def encode_adapter(adapter: Adapter) -> adapter_pb2.Adapter:
    """The message."""
    return adapter_pb2.Adapter(name=adapter.name, hash=adapter.hash, path=adapter.path)


def decode_adapter(message: adapter_pb2.Adapter) -> Adapter:
    """The adapter of a message."""
    return Adapter(message.name, message.hash, message.path)
