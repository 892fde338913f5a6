"""An attention worker whose GPU fails when the file FAULT_FILE exists. It removes the file; then all calls fail."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from services.attn_worker.__main__ import main
from services.attn_worker.layers.mha.torch_attention import TorchAttention

FAULT_FILE = "FAULT_FILE"  # the environment variable with the file's name

forward = TorchAttention.forward
has_failed = False


def faulty_forward(backend: TorchAttention, layer: int, qkv: torch.Tensor, attn_out: torch.Tensor) -> None:
    global has_failed
    file = Path(os.environ[FAULT_FILE])
    if file.exists():
        file.unlink()
        has_failed = True
    if has_failed:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    forward(backend, layer, qkv, attn_out)


if __name__ == "__main__":
    TorchAttention.forward = faulty_forward  # type: ignore[method-assign]
    main()
