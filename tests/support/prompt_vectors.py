"""Prompts with vectors in place of tokens: prompt tuning as PEFT stores it, and answers by Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from services.pb import gateway_pb2
from tests.support.reference import reference_model


@torch.inference_mode()
def embeddings_of(model: Path, token_ids: list[int]) -> torch.Tensor:
    """The model's embeddings of tokens, float32 [num_tokens, hidden]."""
    return reference_model(model).get_input_embeddings()(torch.tensor(token_ids)).clone()


def random_vectors(model: Path, num_tokens: int, seed: int) -> torch.Tensor:
    """Vectors as large as embeddings that are none, float32 [num_tokens, hidden]."""
    table = reference_model(model).get_input_embeddings().weight.detach()
    generator = torch.Generator().manual_seed(seed)
    return table.std() * torch.randn(num_tokens, table.shape[1], generator=generator)


def tokens_after_vectors(model: Path, vectors: torch.Tensor, max_tokens: int) -> list[int]:
    """The tokens that Hugging Face generates greedily after these embeddings, float32 [num_tokens, hidden]."""
    with torch.inference_mode():
        output = reference_model(model).generate(
            inputs_embeds=vectors[None],
            attention_mask=torch.ones(1, len(vectors), dtype=torch.int64),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
        )
    return output[0].tolist()


@torch.no_grad()
def logits_after_vectors(model: Path, vectors: torch.Tensor) -> torch.Tensor:
    """The logits that Hugging Face computes after these embeddings, float32 [vocab]."""
    return reference_model(model)(inputs_embeds=vectors[None], use_cache=False).logits[0, -1].clone()


def embeds_of(vectors: torch.Tensor) -> gateway_pb2.PromptEmbeds:
    """A prompt of these vectors, float32 [num_tokens, hidden], for gRPC."""
    num_tokens, hidden_size = vectors.shape
    return gateway_pb2.PromptEmbeds(
        values=vectors.numpy().tobytes(), num_tokens=num_tokens, hidden_size=hidden_size, dtype="float32"
    )


def make_prompt_tuning(path: Path, virtual_tokens: torch.Tensor, **config: Any) -> Path:
    """Writes an adapter of virtual tokens, [num_virtual_tokens, hidden], as PEFT does; returns `path`."""
    path.mkdir(parents=True)
    save_file({"prompt_embeddings": virtual_tokens}, path / "adapter_model.safetensors")
    settings = {
        "peft_type": "PROMPT_TUNING",
        "task_type": "CAUSAL_LM",
        "num_virtual_tokens": len(virtual_tokens),
        "token_dim": virtual_tokens.shape[1],
        "num_transformer_submodules": 1,
        "inference_mode": True,
    }
    (path / "adapter_config.json").write_text(json.dumps(settings | config))
    return path
