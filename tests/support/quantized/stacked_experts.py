"""gpt-oss with MXFP4 experts: a tensor of codes and one of scales for all experts of a layer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

UNQUANTIZED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def write_model(path: Path, tensors: dict[str, torch.Tensor], **fields: object) -> None:
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def quantize_experts(path: Path) -> dict[str, torch.Tensor]:
    """Gives the model in `path` random MXFP4 experts; returns the tensors of the same model without quantization."""
    generator = torch.Generator().manual_seed(1)
    stored = load_file(path / "model.safetensors")
    plain = dict(stored)
    for name in list(stored):
        if name.endswith(("gate_up_proj", "experts.down_proj")):
            num_experts, in_features, rows = stored.pop(name).shape
            shape = (num_experts, rows, in_features // 32)
            blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(121, 126, shape, dtype=torch.uint8, generator=generator)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    config = {"quant_method": "mxfp4", "modules_to_not_convert": UNQUANTIZED}
    write_model(path, stored, quantization_config=config)
    return plain
