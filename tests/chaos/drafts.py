"""Sources of drafts for the chaos runs: of the embedded model, and often, but not always, right."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from services.common.config import EMBEDDED_MODEL
from tests.support.dense.eagle_head import head_that_knows
from tests.support.dense.medusa_heads import heads_that_know

NOISE = 0.3  # of a draft model's weights, as a part of their own deviation
NUM_KNOWN_TOKENS = 60
NUM_GUESSES = 3


def speculation_settings(speculation: str, directory: Path) -> list[str]:
    """The settings for one kind of speculation; its weights are made in `directory`."""
    settings = [f"scheduler.speculation={speculation}"]
    if speculation == "draft_model":
        settings.append(f"scheduler.draft_model={make_noisy_model(directory / 'draft')}")
    elif speculation in ("medusa", "eagle3"):
        make = heads_that_know if speculation == "medusa" else head_that_knows
        prompt, answer = known_text()
        settings.append(f"scheduler.speculation_model={make(directory / 'heads', prompt, answer, NUM_GUESSES)}")
        settings.append(f"scheduler.num_speculative_tokens={NUM_GUESSES}")
    return settings


def make_noisy_model(path: Path) -> Path:
    """A copy of the embedded model with noise on its weights, so that it is sometimes wrong."""
    shutil.copytree(EMBEDDED_MODEL, path)
    generator = torch.Generator().manual_seed(0)
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            noise = torch.randn(tensor.shape, generator=generator)
            tensors[name] = tensor + (NOISE * tensor.float().std() * noise).to(tensor.dtype)
        save_file(tensors, file, metadata={"format": "pt"})
    return path


def known_text() -> tuple[str, list[int]]:
    """The beginning of the documents, with which many prompts begin, too, and what follows in them."""
    text = (EMBEDDED_MODEL / "documents.txt").read_text()
    tokens = AutoTokenizer.from_pretrained(EMBEDDED_MODEL).encode(text[:1200], add_special_tokens=False)
    prompt = AutoTokenizer.from_pretrained(EMBEDDED_MODEL).decode(tokens[:10])
    return prompt, tokens[10 : 10 + NUM_KNOWN_TOKENS]
