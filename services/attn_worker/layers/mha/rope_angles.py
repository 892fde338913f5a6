"""Cosines and sines for the Triton kernels that rotate: tables on the device, and the row of each token.

`StreamingAngles` are those of texts without an end: StreamingLLM (arXiv:2309.17453).
"""

from __future__ import annotations

import numpy as np
import torch

from services.attn_worker.cache.step_metadata import StepMetadata
from services.attn_worker.layers.step_upload import StepUpload
from services.common.attention.rope import RotaryEmbedding, UnboundedRotaryEmbedding, length_dependent_beyond
from services.common.model_config import ModelConfig, RopeConfig


class RopeAngles:
    """The tables of cosines and sines that the kernels read, and the row of each token.

    A table is float32 [num_rows, head_dim of its layers], cosines first. It has one row per position; for longrope two
    blocks of such rows, one per kind of rotation; for dynamic scaling one row per token, computed in each step. All
    tables have the same rows: at most one rotary embedding of a model depends on the length, and then layers without
    rotation are the only others. A part of the head that is not rotated has a cosine of 1. With three axes, tokens
    whose positions on them differ have rows of their own behind the others, computed in each step.
    """

    def __init__(
        self, config: ModelConfig, max_model_len: int, max_num_tokens: int, device: torch.device
    ) -> None:
        self._beyond = length_dependent_beyond(config.rope)
        self._max_model_len = max_model_len
        self._is_dynamic = config.rope.rope_type == "dynamic"
        self._rope: RotaryEmbedding | None = None  # of steps; None: all rows are there already
        if self._is_dynamic or config.rope.axes:
            self._rope = RotaryEmbedding(config.rope, max_model_len, device)
        self._inputs: torch.Tensor | None = None  # int32 [2, num_tokens], positions and rope_lens
        self._on_axes: torch.Tensor | None = None  # int32 [3, n], the positions of the tokens with rows of their own
        num_blocks = 1 if self._beyond is None else 2
        num_rows = max_num_tokens if self._is_dynamic else num_blocks * max_model_len
        if config.rope.axes:
            assert num_blocks == 1, "such embeddings do not depend on the length"
            num_rows += max_num_tokens
        kinds = [(rope, heads.head_dim) for rope, heads in zip(config.layer_ropes, config.layer_heads, strict=True)]
        tables = {
            kind: self._make_table(*kind, num_rows, device) for kind in {(config.rope, config.head_dim), *kinds}
        }
        self.table = tables[config.rope, config.head_dim]
        self.tables = [tables[kind] for kind in kinds]  # by layer

    def write(self, step: StepMetadata, upload: StepUpload) -> np.ndarray:
        """The tokens' rows in the table, int32 [num_tokens]. Puts the inputs of `compute` into `upload`."""
        if self._is_dynamic:
            both, on_device = upload.reserve((2, len(step.positions)))
            both[...] = step.positions, step.rope_lens
            self._inputs = on_device
            return np.arange(len(step.positions), dtype=np.int32)
        if self._beyond is not None:
            return step.positions + np.int32(self._max_model_len) * (step.rope_lens > self._beyond)
        self._on_axes = None
        if step.rope_positions is None:
            return step.positions
        rows = step.rope_positions[0].copy()
        own = np.flatnonzero((step.rope_positions != rows).any(axis=0))
        if len(own):
            positions, self._on_axes = upload.reserve((3, len(own)))
            positions[...] = step.rope_positions[:, own]
            rows[own] = self._max_model_len + np.arange(len(own))
        return rows

    def compute(self) -> None:
        """Fills the rows that belong to tokens of the step."""
        if self._rope is None:
            return
        if self._inputs is not None:
            positions, rope_lens = self._inputs.long()
            fill_angles(self.table[: len(positions)], *self._rope(positions, rope_lens))
        if self._on_axes is not None:
            positions = self._on_axes.long()
            rows = self.table[self._max_model_len : self._max_model_len + positions.shape[1]]
            fill_angles(rows, *self._rope(positions, positions[0]))

    def _make_table(
        self, rope: RopeConfig | None, head_dim: int, num_rows: int, device: torch.device
    ) -> torch.Tensor:
        table = torch.zeros(num_rows, head_dim, device=device)
        table[:, : head_dim // 2] = 1.0  # no rotation
        if rope is None or self._is_dynamic:
            return table
        positions = torch.arange(self._max_model_len, device=device)
        embedding = RotaryEmbedding(rope, self._max_model_len, device)
        beyond = length_dependent_beyond(rope) or 0
        blocks = table.split(self._max_model_len)
        for block, length in zip(blocks, (0,) if self._beyond is None else (0, beyond + 1), strict=False):
            fill_angles(block, *embedding(positions, torch.full_like(positions, length)))
        return table


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
                fill_angles(table[first : first + len(each)], *embedding(each, each))


def fill_angles(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Writes cosines and sines [n, rotary_dim / 2] to rows [n, head_dim] of a table; others of their halves stay."""
    half, num_pairs = rows.shape[1] // 2, cos.shape[1]
    rows[:, :num_pairs] = cos
    rows[:, half : half + num_pairs] = sin
