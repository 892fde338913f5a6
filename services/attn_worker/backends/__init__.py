"""The seam between the attention worker's engine and the kernels that run a layer."""

from __future__ import annotations

from typing import Protocol

import torch

from services.attn_worker.step_metadata import StepMetadata


class AttentionBackend(Protocol):
    """RoPE, paged KV cache and attention on one device; called by the engine thread alone.

    The KV cache belongs to the backend. Tensors are of the model's dtype, on the backend's device, and
    callers hold `torch.inference_mode`.
    """

    def begin_step(self, step: StepMetadata) -> None:
        """Prepare what all layers of a step share."""
        ...

    def forward(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """Rotate, append to the cache and attend, for the rows of the step begun last.

        qkv: [num_tokens, qkv_size], heads of q, then k, then v; not modified.
        out: [num_tokens, attn_size], written in place.
        """
        ...
