"""Checkpoints of Medusa heads, and what such heads draft, by the formula of the paper (arXiv:2401.10774)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from services.common.config import EMBEDDED_MODEL
from tests.support.reference import VOCAB_SIZE, reference_model

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Head:
    """One head: residual blocks, and a projection to the vocabulary."""

    blocks: list[tuple[torch.Tensor, torch.Tensor]]  # weight and bias of each
    lm_head: torch.Tensor

    def draft(self, hidden: torch.Tensor) -> int:
        """hidden [hidden_size] -> the most likely token."""
        for weight, bias in self.blocks:
            z = weight @ hidden + bias
            hidden = hidden + z / (1 + torch.exp(-z))
        return int((self.lm_head @ hidden).argmax())


def random_heads(num_heads: int, hidden_size: int, vocab_size: int, num_blocks: int = 1, seed: int = 0) -> list[Head]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * hidden_size**-0.5

    def block() -> tuple[torch.Tensor, torch.Tensor]:
        return random(hidden_size, hidden_size), 4 * random(hidden_size)

    return [Head([block() for _ in range(num_blocks)], random(vocab_size, hidden_size)) for _ in range(num_heads)]


def fitted_heads(num_heads: int, hidden: torch.Tensor, following: list[int], vocab_size: int) -> list[Head]:
    """Heads that draft one text right: least squares, without residual blocks that do anything.

    hidden: [n, hidden_size], n at most hidden_size; following: the n + num_heads tokens, the first of which the model
    samples from hidden[0]
    """
    num_rows, size = hidden.shape
    assert num_rows <= size and len(following) == num_rows + num_heads
    nothing = torch.zeros(size, size), torch.zeros(size)
    heads = []
    for place in range(1, num_heads + 1):
        wanted = torch.nn.functional.one_hot(torch.tensor(following[place : place + num_rows]), vocab_size)
        heads.append(Head([nothing], torch.linalg.lstsq(hidden.double(), wanted.double()).solution.T.float()))
    return heads


def in_layout_of_medusa(heads: list[Head]) -> Tensors:
    """The names of FasterDecoding's Medusa."""
    tensors: Tensors = {}
    for i, head in enumerate(heads):
        for j, (weight, bias) in enumerate(head.blocks):
            tensors |= {f"{i}.{j}.linear.weight": weight, f"{i}.{j}.linear.bias": bias}
        tensors[f"{i}.{len(head.blocks)}.weight"] = head.lm_head
    return tensors


def in_layout_of_vllm(heads: list[Head]) -> Tensors:
    """The names of vLLM."""
    tensors: Tensors = {}
    for i, head in enumerate(heads):
        for j, (weight, bias) in enumerate(head.blocks):
            tensors |= {f"blocks.{i}.layers.{j}.weight": weight, f"blocks.{i}.layers.{j}.bias": bias}
        tensors[f"lm_heads.{i}.weight"] = head.lm_head
    return tensors


def write_heads(path: Path, tensors: Tensors, file: str = "medusa_lm_head.safetensors", **config: Any) -> Path:
    """Writes a directory with config.json and these tensors; returns `path`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path / file)
    return path


@torch.inference_mode()
def heads_that_know(path: Path, prompt: str, answer: list[int], num_heads: int) -> Path:
    """Heads of the embedded model, in the directory `path`, that draft all but the last tokens of one answer right.

    Hugging Face gives the hidden states from which the answer's tokens are sampled.
    """
    tokens = AutoTokenizer.from_pretrained(EMBEDDED_MODEL).encode(prompt) + answer
    hidden = reference_model(EMBEDDED_MODEL).model(torch.tensor([tokens])).last_hidden_state[0, -len(answer) - 1 :]
    heads = fitted_heads(num_heads, hidden[: len(answer) - num_heads], answer, VOCAB_SIZE)
    return write_heads(path, in_layout_of_medusa(heads), medusa_num_heads=num_heads, medusa_num_layers=1)
