"""An attention worker that dies in every step that computes NUM_TOKENS tokens, as if a kernel crashed."""

from __future__ import annotations

import os
import signal

import torch

from services.attn_worker.__main__ import main
from services.attn_worker.layers.mha.torch_attention import TorchAttention

NUM_TOKENS = 137

forward = TorchAttention.forward


def poisoned_forward(backend: TorchAttention, layer: int, qkv: torch.Tensor, attn_out: torch.Tensor) -> None:
    if len(qkv) == NUM_TOKENS:
        os.kill(os.getpid(), signal.SIGKILL)
    forward(backend, layer, qkv, attn_out)


if __name__ == "__main__":
    TorchAttention.forward = poisoned_forward  # type: ignore[method-assign]
    main()
