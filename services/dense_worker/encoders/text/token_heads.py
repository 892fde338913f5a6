"""Reads the layers for the states of tokens that a checkpoint has in files of their own (BGE-M3, arXiv:2402.03216)."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch

from services.common.errors import ModelError
from services.common.pooling.pooling_config import PoolingConfig, TokenHead
from services.dense_worker.encoders.text.text_encoder import Affine, HeadLayer
from services.dense_worker.kernels.linear.quantized.layer import FLOATS
from services.dense_worker.model.checkpoint import Checkpoint

_ACTIVATIONS = {TokenHead.SPARSE: "relu", TokenHead.COLBERT: None}


def load_token_heads(
    path: Path, pooling: PoolingConfig, hidden_size: int, device: torch.device
) -> dict[TokenHead, HeadLayer]:
    """Those in `path`, in float32. Raises `ModelError` for a tensor that is missing or of another shape."""
    heads = {}
    for head in pooling.token_heads:
        file, num_rows = path / f"{head.file_stem}.safetensors", _num_rows(head, hidden_size)
        with ExitStack() as opened:
            checkpoint = Checkpoint([file], opened, lambda name: name)
            parts = []
            for name, shape in (("weight", (num_rows, hidden_size)), ("bias", (num_rows,))):
                if name not in checkpoint:
                    raise ModelError(f"{file} has no tensor {name}")
                parts.append(checkpoint.read(name, FLOATS, (shape,)).to(device, torch.float32))
        heads[head] = HeadLayer(Affine(*parts), _ACTIVATIONS[head])
    return heads


def random_token_heads(
    pooling: PoolingConfig, hidden_size: int, device: torch.device, generator: torch.Generator
) -> dict[TokenHead, HeadLayer]:
    """Layers of the same shapes with random weights."""
    heads = {}
    for head in pooling.token_heads:
        num_rows = _num_rows(head, hidden_size)
        weight = torch.randn(num_rows, hidden_size, generator=generator) * hidden_size**-0.5
        heads[head] = HeadLayer(Affine(weight.to(device), torch.zeros(num_rows, device=device)), _ACTIVATIONS[head])
    return heads


def _num_rows(head: TokenHead, hidden_size: int) -> int:
    return 1 if head is TokenHead.SPARSE else hidden_size
