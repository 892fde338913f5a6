"""Cosines and sines for the Triton kernels when texts have no end: StreamingLLM (arXiv:2309.17453)."""

from __future__ import annotations

import numpy as np
import torch

from services.attn_worker.layers.step_upload import StepUpload
from services.attn_worker.runner.step_metadata import StepMetadata
from services.common.attention.rope import UnboundedRotaryEmbedding
from services.common.model_config import ModelConfig


class StreamingAngles:
    """The same as `RopeAngles`, but a table has rows for the tokens of a step alone, computed in each step.

    Row i is for token i at its position in the text. Row i + `max_num_tokens` is for its place among the tokens that it
    sees, by which it is rotated when it meets the sinks: its position, at most `last_place`.
    """

    def __init__(self, config: ModelConfig, last_place: int, max_num_tokens: int, device: torch.device) -> None:
        self._last_place, self._max_num_tokens = last_place, max_num_tokens
        self._positions: torch.Tensor | None = None  # int32 [num_tokens]
        kinds = [(rope, heads.head_dim) for rope, heads in zip(config.layer_ropes, config.layer_heads, strict=True)]
        tables = {}
        for rope, head_dim in set(kinds):
            tables[rope, head_dim] = table = torch.zeros(2 * max_num_tokens, head_dim, device=device)
            table[:, : head_dim // 2] = 1.0  # no rotation
        self._computed = [
            (UnboundedRotaryEmbedding(rope, device), table) for (rope, _), table in tables.items() if rope is not None
        ]
        self.tables = [tables[kind] for kind in kinds]  # by layer

    def write(self, step: StepMetadata, upload: StepUpload) -> np.ndarray:
        """The tokens' rows in the table, int32 [num_tokens]. Puts the inputs of `compute` into `upload`."""
        host, self._positions = upload.reserve(step.positions.shape)
        host[...] = step.positions
        return np.arange(len(step.positions), dtype=np.int32)

    def compute(self) -> None:
        """Fills the tables for the tokens of the step."""
        positions = self._positions.long()
        for embedding, table in self._computed:
            for first, each in ((0, positions), (self._max_num_tokens, positions.clamp(max=self._last_place))):
                cos, sin = embedding(each, each)
                rows, half = table[first : first + len(each)], table.shape[1] // 2
                rows[:, : cos.shape[1]] = cos
                rows[:, half : half + sin.shape[1]] = sin
