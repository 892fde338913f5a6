"""Sources of drafts for the chaos runs: of the embedded model, and often, but not always, right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from services.common.config import EMBEDDED_MODEL
from tests.chaos.cases import KNOWN_PROMPT
from tests.support.dense.eagle_head import head_that_knows
from tests.support.dense.medusa_heads import heads_that_know
from tests.support.reference import reference_tokens

NOISE = 0.15  # of a draft model's weights, as a part of their own deviation
NUM_KNOWN_TOKENS = 60
NUM_DRAFTS = 3


def speculation_settings(speculation: str, directory: Path, num_layers: int | None) -> list[str]:
    """The settings for one kind of speculation; its weights are made in `directory`.

    num_layers: of the served model and of a draft model; none: all
    """
    settings = [f"scheduler.speculation={speculation}"]
    if speculation == "draft_model":
        settings.append(f"scheduler.draft_model={make_noisy_model(directory / 'draft', num_layers)}")
    elif speculation in ("medusa", "eagle3"):
        make = heads_that_know if speculation == "medusa" else head_that_knows
        path = make(directory / "heads", KNOWN_PROMPT, known_answer(), NUM_DRAFTS)
        settings.append(f"scheduler.speculation_model={path}")
        settings.append(f"scheduler.num_speculative_tokens={NUM_DRAFTS}")
    return settings


def make_noisy_model(path: Path, num_layers: int | None = None) -> Path:
    """A copy of the embedded model or its first layers, with noise on the weights, so that it is sometimes wrong."""
    shutil.copytree(EMBEDDED_MODEL, path)
    config = json.loads((path / "config.json").read_text())
    num_layers = num_layers or config["num_hidden_layers"]
    left_out = tuple(f"model.layers.{layer}." for layer in range(num_layers, config["num_hidden_layers"]))
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    generator = torch.Generator().manual_seed(0)
    for file in path.glob("*.safetensors"):
        tensors = {name: tensor for name, tensor in load_file(file).items() if not name.startswith(left_out)}
        for name, tensor in tensors.items():
            noise = torch.randn(tensor.shape, generator=generator)
            tensors[name] = tensor + (NOISE * tensor.float().std() * noise).to(tensor.dtype)
        save_file(tensors, file, metadata={"format": "pt"})
    return path


def known_answer() -> list[int]:
    """How the embedded model goes on after KNOWN_PROMPT."""
    prompt = AutoTokenizer.from_pretrained(EMBEDDED_MODEL).encode(KNOWN_PROMPT)
    return reference_tokens(EMBEDDED_MODEL, prompt, NUM_KNOWN_TOKENS)
