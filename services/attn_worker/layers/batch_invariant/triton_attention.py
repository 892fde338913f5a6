"""`BatchInvariantTritonAttention`: paged attention on CUDA whose rows do not depend on the step to the last bit.

A layer has two launches: one rotates and appends the keys and values of all rows, one attends (`triton_attend.py`); a
third one attends for long chunks. Called by the engine thread alone; all work goes to the current stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton

from services.attn_worker.cache.block_storage import BlockStorage
from services.attn_worker.cache.step_metadata import StepMetadata, build_step_metadata
from services.attn_worker.layers import DECODE_ONLY, BackendSetup, StepShape
from services.attn_worker.layers.batch_invariant.piece_items import TextRows, fill_items
from services.attn_worker.layers.batch_invariant.triton_attend import (
    FEW_ROWS,
    MANY_ROWS,
    PIECE,
    PieceWorkspace,
    attend_pieces,
)
from services.attn_worker.layers.mha.rope_angles import RopeAngles
from services.attn_worker.layers.mha.triton_cache_layout import TABLE_SLACK
from services.attn_worker.layers.mha.triton_rope_append import append_prefill
from services.attn_worker.layers.mha.triton_scores import ScoreOptions
from services.attn_worker.layers.mha.work_items import NUM_FIELDS
from services.attn_worker.layers.step_upload import StepUpload
from services.attn_worker.layers.triton_attention import num_sms_of, pairs_of, write_block_tables
from services.channel import rows_of_layer
from services.common.attention.learned import Learned
from services.common.errors import CapacityError
from services.common.families.shape import LayerHeads

_MAX_SHORT_CHUNK = 16  # tokens, whose rows are attended in tiles of few, as those of single tokens are
_PROGRAMS_PER_SM = 2  # tiles of few rows are split until so many programs run


class _ItemKind(NamedTuple):
    """Layers of one kind share items."""

    heads_of_group: int  # q heads of a kv head
    window: int | None
    group: int  # of layers, which share blocks

    def num_rows(self, fewest: int) -> int:
        """Of a tile with at least `fewest`: whole tokens."""
        return max(fewest, triton.next_power_of_2(self.heads_of_group))

    def num_tokens(self, fewest: int) -> int:
        """Of such a tile."""
        return self.num_rows(fewest) // triton.next_power_of_2(self.heads_of_group)


@dataclass(frozen=True, slots=True)
class _Step:
    """The inputs of the kernels for a step, on the device."""

    angle_rows: torch.Tensor  # int32 [num_rows]
    slots: list[torch.Tensor]  # int32 [num_rows], by group of layers
    block_tables: torch.Tensor  # int32, flat
    # By the fewest rows of a tile, and by kind: int32 [num_items, NUM_FIELDS].
    items: dict[int, dict[_ItemKind, torch.Tensor]]


class BatchInvariantTritonAttention:
    """A CapturableAttention with one order of additions, in bfloat16 or float16.

    Steps in which every sequence has one token are captured.
    """

    captured_shapes: Sequence[StepShape] = (DECODE_ONLY,)

    def __init__(self, setup: BackendSetup) -> None:
        """Raises CapacityError if memory is too small. `select_backend` has refused what it does not do."""
        config, spec, dtype, device = setup.config, setup.spec, setup.dtype, setup.device
        max_model_len, max_num_seqs, max_num_tokens = setup.max_model_len, setup.max_num_seqs, setup.max_num_tokens
        assert set(spec.dtypes) == {dtype}, "the KV cache has the model's dtype"
        assert (spec.num_blocks + 1) * spec.block_size < 2**31, "slots are int32"
        options = config.attention
        slopes = torch.tensor(options.alibi_slopes, device=device) if options.alibi_slopes else None
        plain = ScoreOptions(options.scale or config.head_dim**-0.5, options.softcap or 0.0, slopes)
        self._sinks: torch.Tensor | None = None
        self._scores = [plain] * config.num_layers
        if options.has_sinks:  # rows of a multiple of 16 bytes, so that kernels are compiled once
            self._sinks = torch.zeros(config.num_layers, -(-config.num_heads // 4) * 4, device=device)
            self._scores = [
                ScoreOptions(plain.scale, plain.softcap, plain.slopes, sinks=of_layer) for of_layer in self._sinks
            ]
        self._config, self._spec, self._heads = config, spec, config.layer_heads
        self._max_num_seqs, self._max_num_tokens = max_num_seqs, max_num_tokens
        self._pairs = [
            pairs_of(rope or config.rope, heads.head_dim, options.rotates_pairs)
            for rope, heads in zip(config.layer_ropes, self._heads, strict=True)
        ]
        self._kinds = [
            _ItemKind(heads.num_heads // heads.num_kv_heads, window, spec.group_of(layer))
            for layer, (window, heads) in enumerate(zip(spec.windows, self._heads, strict=True))
        ]
        self._distinct_kinds = list(dict.fromkeys(self._kinds))
        compiled_kinds = zip(self._kinds, spec.windows, map(_sizes, self._heads), self._pairs, strict=True)
        self.layers_to_compile = list({kind: layer for layer, kind in enumerate(compiled_kinds)}.values())
        fewest_kv_heads, most_kv_heads = (f(each.num_kv_heads for each in self._heads) for f in (min, max))
        # Items that splitting makes more than there are tiles: enough to occupy the GPU, and to split any one text.
        most_pieces = -(-max_model_len // PIECE)
        self._num_extra = max(most_pieces, -(-_PROGRAMS_PER_SM * num_sms_of(device) // fewest_kv_heads))
        self.storage = setup.storage or BlockStorage(spec, spec.head_major_block, device)
        num_items = len(self._distinct_kinds) * (2 * max_num_tokens + max_num_seqs + self._num_extra)
        num_tables = spec.num_groups * max_num_seqs * -(-max_model_len // spec.block_size)
        num_entries = num_items * NUM_FIELDS + num_tables + (4 + spec.num_groups) * max_num_tokens + TABLE_SLACK
        most_rows = max(kind.num_rows(FEW_ROWS) for kind in self._kinds) * most_kv_heads * 2 * self._num_extra
        widest = max(16, *(triton.next_power_of_2(heads.head_dim) for heads in self._heads))
        try:
            self._workspace = PieceWorkspace(
                torch.empty(most_rows * widest, device=device),
                torch.empty(2, most_rows, device=device),
                torch.zeros(2 * self._num_extra * most_kv_heads, dtype=torch.int32, device=device),
            )
            self._angles = RopeAngles(config, max_model_len, max_num_tokens, device)
            self._upload = StepUpload(num_entries, device)
        except RuntimeError as error:  # includes torch.OutOfMemoryError
            raise CapacityError(
                f"{spec.num_blocks} KV blocks ({spec.num_bytes} bytes) and workspaces do not fit on {device}: {error}"
            ) from error
        if device.type == "cuda":  # not in Triton's interpreter
            self._compile(min(max_num_tokens, max_model_len))

    def use_learned(self, learned: Learned) -> None:
        """Sets learned sinks, in place: captured graphs read them. No layer stores FP8."""
        if learned.sinks:
            assert self._sinks is not None, "the model has sinks"
            self._sinks[:, : self._config.num_heads].copy_(torch.tensor(learned.sinks))

    def captured_shape(self, step: StepMetadata) -> StepShape | None:
        """DECODE_ONLY if every sequence has one token; None: no graph can run it."""
        return DECODE_ONLY if len(step.positions) == len(step.num_tokens) else None

    def begin_step(
        self, step: StepMetadata, padded_num_rows: int | None = None, shape: StepShape = DECODE_ONLY
    ) -> None:
        """Splits the kernels' work into items and sends them to the device."""
        num_seqs, num_rows = len(step.num_tokens), len(step.positions)
        padded = num_rows if padded_num_rows is None else padded_num_rows
        if num_seqs > self._max_num_seqs or padded > self._max_num_tokens:
            raise CapacityError(
                f"a step has {num_seqs} sequences and {padded} tokens, the attention backend was made for"
                f" {self._max_num_seqs} and {self._max_num_tokens}"
            )
        upload, parts = self._upload, step.parts(self._spec.num_groups)
        upload.begin()
        is_short = step.num_tokens <= _MAX_SHORT_CHUNK
        num_short = int(step.num_tokens[is_short].sum()) + padded - num_rows
        # The arrays that a graph reads come first, so that their addresses depend only on `padded`.
        host_rows, angle_rows = upload.reserve((padded,))
        slots = [upload.reserve((padded,)) for _ in parts]
        arrays: dict[int, dict[_ItemKind, tuple[np.ndarray, torch.Tensor]]] = {}
        if num_short:
            shape = (num_short + self._num_extra, NUM_FIELDS)
            arrays[FEW_ROWS] = {kind: upload.reserve(shape) for kind in self._distinct_kinds}
        if not is_short.all():
            longer = step.num_tokens[~is_short]
            arrays[MANY_ROWS] = {
                kind: upload.reserve((int((-(-longer // kind.num_tokens(MANY_ROWS))).sum()), NUM_FIELDS))
                for kind in self._distinct_kinds
            }
        block_tables, table_starts = write_block_tables(parts, self._spec.block_size, upload)
        host_rows[:num_rows] = self._angles.write(step, upload)
        host_rows[num_rows:] = 0
        first_rows = np.cumsum(step.num_tokens) - step.num_tokens
        lengths = step.positions[first_rows + step.num_tokens - 1] + 1
        for group, (part, starts, (host_slots, _)) in enumerate(zip(parts, table_starts, slots, strict=True)):
            host_slots[:num_rows] = part.slot_mapping
            host_slots[num_rows:] = -1
            num_dropped_blocks = (lengths - part.context_lens) // self._spec.block_size
            rows = TextRows(first_rows, step.num_tokens, lengths - step.num_tokens, starts - num_dropped_blocks)
            for fewest, by_kind in arrays.items():
                is_few = fewest == FEW_ROWS
                chosen = rows.select(is_short == is_few)
                num_padding, num_extra = (padded - num_rows, self._num_extra) if is_few else (0, 0)
                for kind, (host, _) in by_kind.items():
                    if kind.group == group:
                        size = kind.num_tokens(fewest)
                        fill_items(host, chosen, num_rows, num_padding, kind.window, size, PIECE, num_extra)
        upload.send()
        self._angles.compute()
        items = {fewest: {kind: each for kind, (_, each) in of.items()} for fewest, of in arrays.items()}
        self._step = _Step(angle_rows, [on_device for _, on_device in slots], block_tables, items)

    def forward(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """Launches the kernels of one layer. `qkv` and `out` have as many rows as the step, with its padding."""
        heads, kind, step = self._heads[layer], self._kinds[layer], self._step
        qkv, out = rows_of_layer(qkv, heads.qkv_size), rows_of_layer(out, heads.attn_size)
        cache, angles, pairs = self.storage.layers[layer], self._angles.tables[layer], self._pairs[layer]
        if heads.kv_layer is None:
            append_prefill(qkv, cache, None, angles, step.angle_rows, step.slots[kind.group], pairs)
        for fewest, by_kind in step.items.items():
            attend_pieces(
                qkv,
                out,
                cache,
                angles,
                step.angle_rows,
                by_kind[kind],
                step.block_tables,
                self._workspace,
                kind.window,
                kind.num_rows(fewest),
                self._scores[layer],
                pairs,
            )

    @torch.inference_mode()
    def _compile(self, max_num_tokens: int) -> None:
        """Runs the kernels on a sequence in the null block, so that no request waits for the compiler."""
        device, dtype = self.storage.layers[0].device, self.storage.layers[0].dtype
        for num_tokens in {1, min(_MAX_SHORT_CHUNK + 1, max_num_tokens)}:
            qkv = torch.zeros(num_tokens, self._config.qkv_size, dtype=dtype, device=device)
            out = torch.empty(num_tokens, self._config.attn_size, dtype=dtype, device=device)
            counts, width, step = np.full(1, num_tokens), -(-num_tokens // self._spec.block_size), None
            for group in reversed(range(self._spec.num_groups)):
                table = np.full((1, width), self._spec.num_blocks_of(group), np.int32)
                none = np.zeros_like(counts)
                step = build_step_metadata(counts, none, counts, table, self._spec.block_size, windows=step)
            self.begin_step(step)
            for layer in self.layers_to_compile:
                self.forward(layer, qkv, out)
        torch.cuda.synchronize()  # steps run on another stream


def _sizes(heads: LayerHeads) -> tuple[int, int, int]:
    return heads.num_heads, heads.num_kv_heads, heads.head_dim
