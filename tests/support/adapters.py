"""Random LoRA adapters as PEFT writes them, and models with their deltas merged in, by the formula of PEFT's docs."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ALL_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    path: Path,
    model: Path,
    *,
    rank: int = 8,
    alpha: float = 16,
    modules: Sequence[str] = ALL_MODULES,
    ranks: Mapping[str, int] | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    std: float = 0.2,
    **config: Any,
) -> Path:
    """Writes a random adapter of the model into `path`; returns `path`.

    ranks: those of modules that have another one; config: further settings, or other values of those set here
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        kind = module.split(".")[-1]
        if kind in modules:
            own = (ranks or {}).get(kind, rank)
            prefix = f"base_model.model.{module}"
            shapes = {"A": (own, weight.shape[1]), "B": (weight.shape[0], own)}
            for half, shape in shapes.items():
                values = torch.randn(shape, generator=generator) * std
                tensors[f"{prefix}.lora_{half}.weight"] = values.to(dtype)
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(modules),
        "bias": "none",
        "rank_pattern": dict(ranks or {}),
    }
    (path / "adapter_config.json").write_text(json.dumps(settings | config))
    return path


def merge_adapter(path: Path, model: Path, adapter: Path, scales: Mapping[str, float] | None = None) -> Path:
    """Writes the model with W + scale · B A in place of W into `path`; returns `path`.

    `scales`: by kind of module where it is not lora_alpha / rank, or lora_alpha / sqrt(rank) with rsLoRA.
    """
    shutil.copytree(model, path)
    config = json.loads((adapter / "adapter_config.json").read_text())
    deltas = load_file(adapter / "adapter_model.safetensors")
    weights = load_file(model / "model.safetensors")
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        prefix = f"base_model.model.{module}.lora"
        if f"{prefix}_A.weight" in deltas:
            a, b = deltas[f"{prefix}_A.weight"].double(), deltas[f"{prefix}_B.weight"].double()
            rank = len(a)
            scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
            scale = (scales or {}).get(module.split(".")[-1], scale)
            weights[name] = (weight.double() + scale * (b @ a)).to(weight.dtype)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path
