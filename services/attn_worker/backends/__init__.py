"""The seam between the attention worker's engine and the kernels that run a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from services.attn_worker.runner.step_metadata import StepMetadata


class AttentionBackend(Protocol):
    """RoPE, paged KV cache and attention on one device; called by the engine thread alone.

    The KV cache belongs to the backend. Tensors are of the model's dtype, on the backend's device, and
    callers hold `torch.inference_mode`.
    """

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to) each, in every layer, in order."""
        ...

    def begin_step(self, step: StepMetadata) -> None:
        """Prepare what all layers of a step share."""
        ...

    def forward(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """Rotate, append to the cache and attend, for the rows of the step begun last.

        qkv: [num_tokens, qkv_size], heads of q, then k, then v; not modified.
        out: [num_tokens, attn_size], written in place.
        """
        ...


class CapturableAttention(AttentionBackend, Protocol):
    """An AttentionBackend on CUDA whose decode-only steps a graph can hold, one graph per `padded_num_seqs`.

    `forward` then makes launches whose grids and addresses depend on `padded_num_seqs` alone. To capture, call
    `begin_step` with any decode-only step (one without sequences too) and that `padded_num_seqs`, run `forward`
    once uncaptured, so that kernels are compiled, and capture `forward` of all layers on `qkv` and `out` at their
    final addresses. To replay, call `begin_step` with the same `padded_num_seqs` on the stream of the replay,
    outside the graph. Steps with prompts cannot be captured: their grids depend on the batch.

    Neither method waits for the device, but for `begin_step` when it runs three steps ahead of it.
    """

    def is_decode_only(self, step: StepMetadata) -> bool:
        """Whether every sequence has one token in the step, so that a captured graph can run it."""
        ...

    def begin_step(self, step: StepMetadata, padded_num_seqs: int | None = None) -> None:
        """Plan the kernels' work and send it to the device; see AttentionBackend.

        padded_num_seqs: for decode-only steps, the rows of qkv and out; those beyond the step's sequences
        are padding, whose output becomes zero. None: no padding. Raises CapacityError for more sequences or
        tokens than the backend was made for.
        """
        ...
