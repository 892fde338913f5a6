"""Cosines and sines for the Triton kernels that rotate: a table on the device, and the row of each token."""

from __future__ import annotations

import numpy as np
import torch

from services.attn_worker.backends.rope import RotaryEmbedding, length_dependent_beyond
from services.attn_worker.backends.step_upload import StepUpload
from services.attn_worker.runner.step_metadata import StepMetadata
from services.common.model_config import ModelConfig


class RopeAngles:
    """The table of cosines and sines that the kernels read, and the row of each token.

    `table` is float32 [num_rows, head_dim], cosines first. It has one row per position; for longrope two blocks of such
    rows, one per kind of rotation; for dynamic scaling one row per token, computed in each step.
    """

    def __init__(
        self, config: ModelConfig, max_model_len: int, max_num_tokens: int, device: torch.device
    ) -> None:
        self._rope = RotaryEmbedding(config.rope, max_model_len, device)
        self._beyond = length_dependent_beyond(config.rope)
        self._max_model_len = max_model_len
        self._is_dynamic = config.rope.rope_type == "dynamic"
        self._inputs: torch.Tensor | None = None  # int32 [2, num_tokens], positions and rope_lens
        if self._is_dynamic:
            self.table = torch.zeros(max_num_tokens, config.head_dim, device=device)
            return
        positions = torch.arange(max_model_len, device=device)
        lengths = [0] if self._beyond is None else [0, self._beyond + 1]
        angles = [
            torch.cat(self._rope(positions, torch.full_like(positions, length)), dim=1) for length in lengths
        ]
        self.table = torch.cat(angles)

    def write(self, step: StepMetadata, upload: StepUpload) -> np.ndarray:
        """The tokens' rows in the table, int32 [num_tokens]. Puts the inputs of `compute` into `upload`."""
        if self._is_dynamic:
            both, on_device = upload.reserve((2, len(step.positions)))
            both[...] = step.positions, step.rope_lens
            self._inputs = on_device
            return np.arange(len(step.positions), dtype=np.int32)
        if self._beyond is not None:
            return step.positions + np.int32(self._max_model_len) * (step.rope_lens > self._beyond)
        return step.positions

    def compute(self) -> None:
        """Fills the table if it has one row per token of the step (dynamic scaling)."""
        if self._inputs is not None:
            positions, rope_lens = self._inputs.long()
            torch.cat(self._rope(positions, rope_lens), dim=1, out=self.table[: len(positions)])
