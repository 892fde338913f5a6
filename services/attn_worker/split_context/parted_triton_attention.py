"""`PartedTritonAttention`: attention on a GPU for steps with rows that see a part of their keys here.

What `PartedTorchAttention` does, with the kernels of `TritonAttention`, which write log-sums. Such steps are not
captured; all others are those of `TritonAttention`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from services.attn_worker.cache.step_metadata import StepMetadata, build_step_metadata
from services.attn_worker.layers import DECODE_ONLY, BackendSetup, StepShape
from services.attn_worker.layers.mha.rope_angles import fill_angles
from services.attn_worker.layers.mha.triton_cache_layout import TABLE_SLACK
from services.attn_worker.layers.mha.triton_decode import DecodeTiles, decode_attention
from services.attn_worker.layers.mha.triton_prefill import SHORT_CONTEXT, PrefillTiles, prefill_attention
from services.attn_worker.layers.mha.triton_rope_append import append_prefill
from services.attn_worker.layers.mha.work_items import (
    NUM_FIELDS,
    ChunkRows,
    DecodeRows,
    fill_decode_items,
    prefill_items,
)
from services.attn_worker.layers.step_upload import StepUpload
from services.attn_worker.layers.triton_attention import TritonAttention
from services.attn_worker.split_context.part_rows import PartRows, RowsOfParts
from services.channel.log_sums import log_sums_of
from services.common.attention.rope import UnboundedRotaryEmbedding
from services.common.batch_buckets import MAX_CAPTURED_PROMPT_ROWS
from services.common.model_config import RopeConfig

# Rows of a chunk of up to so many tokens are attended by the decode kernel, one by one: it splits the keys.
_MAX_FEW_ROWS = 8
_FEWEST_BLOCK_M = 16
_LOG_OF_2 = math.log(2.0)  # kernels take logarithms to base 2


@dataclass(frozen=True, slots=True)
class _SplitStep:
    """The rows of parts in a step, on the device. Arrays by row have an element for each row of the step."""

    rows: torch.Tensor  # int64 [num_part_rows]
    other_rows: torch.Tensor  # int64
    slots: torch.Tensor  # int32 [num_rows], -1: the row is of no part, or its key and value are kept elsewhere
    angle_rows: torch.Tensor  # int32 [num_rows], 0, 1, ...
    angles: dict[RopeConfig | None, torch.Tensor]  # float32 [num_rows, head_dim], cos then sin
    block_tables: torch.Tensor
    decode_items: torch.Tensor | None  # of rows of short chunks; None: there are none
    decode_tiles: DecodeTiles
    prefill_items: torch.Tensor | None  # of the other rows; None: there are none
    prefill_tiles: PrefillTiles
    log_sums: torch.Tensor  # float32 [num_rows, num_heads]; those of rows that see no key here stay -inf


class PartedTritonAttention(TritonAttention):
    """A TritonAttention for layers with equal heads and keys of all tokens, of the model's dtype, without bias or sinks
    (`check_split_context`).
    """

    def __init__(self, setup: BackendSetup) -> None:
        self._split: _SplitStep | None = None  # of the step that began last
        super().__init__(setup)
        device = self._caches[0].device
        [self._kind] = self._distinct_kernel_kinds
        self._unbounded = {
            rope: None if rope is None else UnboundedRotaryEmbedding(rope, device)
            for rope in self._config.layer_ropes
        }
        # Of decode rows; of chunks, in whole blocks of rows, and what is left of each.
        num_items = self._max_num_seqs + self._max_num_pieces
        num_items += self._max_num_tokens // _FEWEST_BLOCK_M + self._max_num_seqs
        num_entries = num_items * NUM_FIELDS + 5 * self._max_num_tokens + self._spec.num_blocks + TABLE_SLACK
        self._part_upload = StepUpload(num_entries, device)
        if device.type == "cuda":  # not in Triton's interpreter
            self._compile_parts()

    def captured_shape(self, step: StepMetadata) -> StepShape | None:
        """None, too, for steps with parts."""
        return None if _parts_of(step) else super().captured_shape(step)

    def begin_step(
        self, step: StepMetadata, padded_num_rows: int | None = None, shape: StepShape = DECODE_ONLY
    ) -> None:
        """The rows of parts are prepared beside all others."""
        split = _parts_of(step)
        self._split = None if split is None else self._prepare_split(split, step.num_rows)
        if self._split is None or len(self._split.other_rows):
            super().begin_step(step, padded_num_rows, shape)

    def forward(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """Launches the kernels of one layer. The keys of rows of parts in `qkv` become log-sums."""
        if (split := self._split) is None:
            super().forward(layer, qkv, out)
            return
        if len(split.other_rows):
            own = out.new_empty(len(split.other_rows), out.shape[1])
            super().forward(layer, qkv.index_select(0, split.other_rows), own)
            out.index_copy_(0, split.other_rows, own)
        self._attend_to_parts(layer, split, qkv, out)

    def _prepare_split(self, split: RowsOfParts, num_rows: int) -> _SplitStep:
        self._part_upload.begin()
        part_rows = np.concatenate([each.rows for each in split.parts])
        # Each is reserved by itself, so that kernels are compiled for one alignment.
        by_row, on_device = zip(*(self._part_upload.reserve((num_rows,)) for _ in range(4)), strict=True)
        order, slots, angle_rows, positions = by_row
        order[: len(part_rows)] = part_rows
        order[len(part_rows) :] = np.setdiff1d(np.arange(num_rows), part_rows)
        slots[:], angle_rows[:], positions[:] = -1, np.arange(num_rows), 0
        for part in split.parts:
            slots[part.rows] = self._slots_of(part)
            positions[part.rows] = np.arange(part.positions.start, part.positions.stop)
        used = [each.block_ids[: -(-each.num_keys // self._block_size)] for each in split.parts]
        tables = self._send_of_parts(np.concatenate([*used, np.zeros(1, np.int64)]))  # an empty one has no address
        starts = np.cumsum([0, *map(len, used[:-1])]).tolist()
        few, many = self._deal([_Placed(*each) for each in zip(split.parts, starts, strict=True)])
        decode_tiles = self._choose_decode_tiles(self._max_num_seqs)[self._kind]
        prefill_tiles = self._choose_prefill_tiles(SHORT_CONTEXT + 1, num_rows)[self._kind]
        decode_items = self._send_decode_items(few, decode_tiles)
        chunks = [each.prefill_items(prefill_tiles.block_m) for each in many]
        own_prefill_items = self._send_of_parts(np.concatenate(chunks)) if chunks else None
        self._part_upload.send()
        rows, own_positions = on_device[0].long(), on_device[3].long()
        return _SplitStep(
            rows=rows[: len(part_rows)],
            other_rows=rows[len(part_rows) :],
            slots=on_device[1],
            angle_rows=on_device[2],
            angles={rope: self._angles_at(own_positions, rope) for rope in self._unbounded},
            block_tables=tables,
            decode_items=decode_items,
            decode_tiles=decode_tiles,
            prefill_items=own_prefill_items,
            prefill_tiles=prefill_tiles,
            log_sums=torch.full((num_rows, self._config.num_heads), float("-inf"), device=rows.device),
        )

    def _deal(self, parts: Sequence[_Placed]) -> tuple[list[_Placed], list[_Placed]]:
        """Those that see keys here: those of few rows, as far as the decode kernel has room for them, and the others.
        """
        few, many, num_few = list[_Placed](), list[_Placed](), 0
        for each in parts:
            num_rows = len(each.part.positions)
            if not each.part.num_keys:
                continue
            if num_rows <= _MAX_FEW_ROWS and num_few + num_rows <= self._max_num_seqs:
                few.append(each)
                num_few += num_rows
            else:
                many.append(each)
        return few, many

    def _slots_of(self, part: PartRows) -> np.ndarray:
        """Where the key and value of each row are kept; -1: elsewhere."""
        places = np.arange(part.positions.start, part.positions.stop) - part.tokens.start
        is_here = (places >= 0) & (places < len(part.tokens))
        places = np.where(is_here, places, 0)
        slots = part.block_ids[places // self._block_size] * self._block_size + places % self._block_size
        return np.where(is_here, slots, -1)

    def _send_decode_items(self, placed: Sequence[_Placed], tiles: DecodeTiles) -> torch.Tensor | None:
        if not placed:
            return None
        columns = [each.decode_columns() for each in placed]
        rows, context_lens, table_starts = map(np.concatenate, zip(*columns, strict=True))
        num_pieces = self._num_pieces(len(rows))
        items, on_device = self._part_upload.reserve((len(rows) + num_pieces, NUM_FIELDS))
        decode = DecodeRows(rows, context_lens, table_starts, np.full(len(rows), -1), rows)
        # Their own keys are in the cache by then.
        fill_decode_items(items, decode, None, num_pieces, tiles.block_n, appends=False)
        return on_device

    def _send_of_parts(self, array: np.ndarray) -> torch.Tensor:
        host, on_device = self._part_upload.reserve(array.shape)
        host[...] = array
        return on_device

    def _angles_at(self, positions: torch.Tensor, rope: RopeConfig | None) -> torch.Tensor:
        head_dim = self._config.head_dim
        table = torch.zeros(len(positions), head_dim, device=positions.device)
        table[:, : head_dim // 2] = 1.0  # no rotation
        if (embedding := self._unbounded[rope]) is not None:
            fill_angles(table, *embedding(positions, positions))
        return table

    def _attend_to_parts(self, layer: int, split: _SplitStep, qkv: torch.Tensor, out: torch.Tensor) -> None:
        config, cache, scores = self._config, self._caches[layer], self._scores[layer]
        angles, pairs = split.angles[config.layer_ropes[layer]], self._pairs[layer]
        append_prefill(qkv, cache, None, angles, split.angle_rows, split.slots, pairs)
        if split.decode_items is not None:
            decode_attention(
                qkv, out, cache, None, angles, split.decode_items, split.block_tables, self._workspace,
                split.decode_tiles, scores, pairs, split.log_sums,
            )  # fmt: skip
        if split.prefill_items is not None:
            prefill_attention(
                qkv, out, cache, None, angles, split.angle_rows, split.prefill_items, split.block_tables, None,
                split.prefill_tiles, scores, pairs, split.log_sums,
            )  # fmt: skip
        own_sums = split.log_sums.index_select(0, split.rows) * _LOG_OF_2
        log_sums_of(qkv, config.q_size, config.num_heads).index_copy_(0, split.rows, own_sums)

    @torch.inference_mode()
    def _compile_parts(self) -> None:
        """Runs the kernels on a part and another row, in the null block, so that no request waits for the compiler."""
        most, device, null_block = self._max_num_tokens, self._caches[0].device, self._spec.num_blocks
        one = np.ones(1, np.int64)
        other = build_step_metadata(one, 0 * one, one, np.full((1, 1), null_block, np.int32), self._block_size)
        for num_tokens in {1, min(_MAX_FEW_ROWS + 1, most), min(MAX_CAPTURED_PROMPT_ROWS + 1, most)}:
            blocks = np.full(-(-num_tokens // self._block_size), null_block)
            part = PartRows(0, range(num_tokens), range(num_tokens), blocks)
            step = replace(other.with_other(RowsOfParts((part,))), num_other_rows=num_tokens)
            qkv = torch.zeros(step.num_rows, self._config.qkv_size, dtype=self._dtype, device=device)
            out = torch.empty(step.num_rows, self._config.attn_size, dtype=self._dtype, device=device)
            self.begin_step(step)
            for layer in self.layers_to_compile:
                self.forward(layer, qkv, out)
        torch.cuda.synchronize()  # steps run on another stream


@dataclass(frozen=True, slots=True)
class _Placed:
    """A part whose blocks begin at `table_start` in the flat block tables."""

    part: PartRows
    table_start: int

    def decode_columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rows that see keys here, how many, and `table_start` of each."""
        positions, tokens = self.part.positions, self.part.tokens
        lengths = np.minimum(np.arange(positions.start, positions.stop) + 1 - tokens.start, len(tokens))
        sees = lengths > 0
        return self.part.rows[sees], lengths[sees], np.full(np.count_nonzero(sees), self.table_start)

    def prefill_items(self, block_m: int) -> np.ndarray:
        """Items of the rows that see keys here, which all see the first one."""
        positions, tokens = self.part.positions, self.part.tokens
        first = max(positions.start, tokens.start)
        columns = (self.part.first_row + first - positions.start, positions.stop - first)
        columns += (positions.stop - tokens.start, self.table_start)
        items = prefill_items(ChunkRows(*(np.array([each]) for each in columns)), block_m)
        items[:, 4] = self.part.num_keys
        return items


def _parts_of(step: StepMetadata) -> RowsOfParts | None:
    return next((each for each in step.others if isinstance(each, RowsOfParts)), None)

