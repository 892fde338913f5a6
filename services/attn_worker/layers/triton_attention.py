"""Paged attention on CUDA with Triton kernels: one launch per layer for decode rows, two or three more for prompts.

Everything that the kernels read about a step lies in one int32 buffer on the device, which one asynchronous copy in
`begin_step` fills. Called by the engine thread alone; all work goes to the current stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from services.attn_worker.cache.block_storage import BlockStorage
from services.attn_worker.cache.step_metadata import StepMetadata, build_step_metadata
from services.attn_worker.layers import DECODE_ONLY, BackendSetup, StepShape
from services.attn_worker.layers.latent.triton_decode import choose_latent_decode_tiles, decode_latent, decode_load
from services.attn_worker.layers.latent.triton_prefill import (
    append_latent,
    choose_latent_prefill_tiles,
    prefill_latent,
)
from services.attn_worker.layers.mha.rope_angles import RopeAngles, StreamingAngles
from services.attn_worker.layers.mha.triton_cache_layout import TABLE_SLACK
from services.attn_worker.layers.mha.triton_decode import (
    DecodeTiles,
    DecodeWorkspace,
    choose_decode_tiles,
    decode_attention,
)
from services.attn_worker.layers.mha.triton_prefill import (
    SHORT_CONTEXT,
    PrefillTiles,
    choose_prefill_tiles,
    prefill_attention,
)
from services.attn_worker.layers.mha.triton_rope_append import RotaryPairs, append_prefill
from services.attn_worker.layers.mha.triton_scores import ScoreOptions
from services.attn_worker.layers.mha.triton_short_chunks import (
    MAX_SHORT_CHUNK,
    ChunkTiles,
    attend_short_chunks,
    choose_chunk_tiles,
    most_tokens_of_few_rows,
    shortest_split_context,
)
from services.attn_worker.layers.mha.work_items import (
    NO_ITEM,
    NUM_FIELDS,
    ChunkRows,
    DecodeRows,
    chunk_items,
    fill_decode_items,
    prefill_items,
)
from services.attn_worker.layers.step_upload import StepUpload
from services.channel import rows_of_layer
from services.common.attention.learned import Learned
from services.common.batch_buckets import MAX_CAPTURED_CHUNK_ROWS, MAX_CAPTURED_PROMPT_ROWS
from services.common.errors import CapacityError, ConfigError
from services.common.model_config import RopeConfig

# At least, in a piece of a short chunk's context; smaller pieces cost more in merging than they gain.
_KEYS_PER_QUERY, _KEYS_OF_PIECE = 4, 128
_MAX_LONGER_CHUNKS = 8  # in a captured step
_MAX_CAPTURED_PROMPTS = 16  # in a captured step
_MAX_DECODE_ROWS_BESIDE_PROMPTS = 64  # in a captured step
_RAGGED_TABLES_FROM = 1 << 16  # from this many entries on, padded block tables may be stored without padding


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """The kernels that run in every layer: functions with the same parameters for every kind of attention."""

    choose_decode_tiles: Callable[..., DecodeTiles]
    choose_prefill_tiles: Callable[..., PrefillTiles]
    decode: Callable[..., None]  # rows of sequences with one token: appends and attends
    append: Callable[..., None]  # the other rows
    attend: Callable[..., None]  # for the other rows, whose keys have been appended
    # For those of them that belong to short chunks; None: `attend` takes these, too.
    attend_short_chunks: Callable[..., None] | None


PLAIN_KERNELS = LayerKernels(
    choose_decode_tiles,
    choose_prefill_tiles,
    decode_attention,
    append_prefill,
    prefill_attention,
    attend_short_chunks,
)
LATENT_KERNELS = LayerKernels(
    choose_latent_decode_tiles,
    choose_latent_prefill_tiles,
    decode_latent,
    append_latent,
    prefill_latent,
    None,
)


@dataclass(frozen=True, slots=True)
class _Prefill:
    """The inputs of the kernels for rows of prompts, in the layers of one group."""

    slots: torch.Tensor  # int32 [num_tokens], -1 for decode rows
    angle_rows: torch.Tensor  # int32 [num_tokens]
    # Of chunks whose contexts are not split, int32 [num_items, NUM_FIELDS], by the number of their rows.
    items: dict[int, torch.Tensor]
    tiles: dict[_KernelKind, PrefillTiles]  # for these chunks; empty: there are none
    num_later: torch.Tensor | None = None  # int32 [num_tokens], see `StepMetadata`; None: no row sees later ones


@dataclass(frozen=True, slots=True)
class _ShortChunks:
    """The inputs of the kernel for short chunks whose contexts are split, in the layers of all groups."""

    tiles: dict[_KernelKind, ChunkTiles]
    items: dict[tuple[_ItemKind, int], torch.Tensor]  # int32 [num_items, NUM_FIELDS], by kind and tokens of a tile
    appends: bool = False  # whether the kernel also stores the rows' keys and values, as each chunk is a single tile


class _KernelKind(NamedTuple):
    """What the kernels of a layer are compiled for."""

    cache_dtype: torch.dtype
    num_kv_heads: int
    head_dim: int


class _ItemKind(NamedTuple):
    """Layers of one kind share the items of decode rows."""

    window: int | None
    appends: bool  # whether the layers store keys and values of their own
    group: int  # of layers


class TritonAttention:
    """A CapturableAttention in float32, bfloat16 or float16; a decode-only step is one launch per layer."""

    def __init__(self, setup: BackendSetup) -> None:
        """Raises CapacityError if memory is too small, ConfigError if the cache has neither the dtype nor 8 bits."""
        config, spec, dtype, device = setup.config, setup.spec, setup.dtype, setup.device
        max_model_len, max_num_seqs, max_num_tokens = setup.max_model_len, setup.max_num_seqs, setup.max_num_tokens
        _check(setup)
        options = config.attention
        self._sinks: torch.Tensor | None = None
        if options.has_sinks:  # rows of a multiple of 16 bytes, so that kernels are compiled once
            self._sinks = torch.zeros(config.num_layers, -(-config.num_heads // 4) * 4, device=device)
        self._scores = _scores_of_layers(setup, self._sinks)
        self._heads = config.layer_heads
        self._widths = [(heads.qkv_size, heads.attn_size) for heads in self._heads]
        self._pairs = [
            pairs_of(rope or config.rope, heads.head_dim, options.rotates_pairs)
            for rope, heads in zip(config.layer_ropes, self._heads, strict=True)
        ]
        self._config = config
        self._spec = spec
        self._block_size = spec.block_size
        self._dtype = dtype
        self._max_num_seqs = max_num_seqs
        self._max_num_tokens = max_num_tokens
        self._num_sms = num_sms_of(device)
        fewest_kv_heads, most_kv_heads = (f(each.num_kv_heads for each in self._heads) for f in (min, max))
        self._kernels, programs_per_item, angles_config = PLAIN_KERNELS, fewest_kv_heads, config
        if options.value_dim is not None:
            self._kernels, programs_per_item = LATENT_KERNELS, decode_load(config.num_heads, dtype)
            angles_config = replace(config, head_dim=config.rope.rotary_dim)
        self._programs_per_item = programs_per_item
        self._fewest_kv_heads = fewest_kv_heads
        self._kernel_kinds = [
            _KernelKind(spec.dtype_of(layer), *spec.kv_shape(layer)) for layer in range(spec.num_layers)
        ]
        self._item_kinds = [
            _ItemKind(window, heads.kv_layer is None, spec.group_of(layer))
            for layer, (window, heads) in enumerate(zip(spec.windows, self._heads, strict=True))
        ]
        # What a step is prepared for: one of each kind, not one of each layer.
        self._distinct_kernel_kinds = list(dict.fromkeys(self._kernel_kinds))
        self._distinct_item_kinds = list(dict.fromkeys(self._item_kinds))
        self._max_few_rows_chunk, self._max_short_chunk, self._shortest_split_context = 0, 0, 0
        # Streamed texts have windows, so that their contexts are never long.
        if self._kernels.attend_short_chunks is not None and not options.num_sink_tokens:
            groups = [config.num_heads // kind.num_kv_heads for kind in self._kernel_kinds]
            self._max_few_rows_chunk = min(map(most_tokens_of_few_rows, groups))
            self._shortest_split_context = max(map(shortest_split_context, groups))
            has_long_contexts = max_model_len >= self._shortest_split_context
            self._max_short_chunk = MAX_SHORT_CHUNK if has_long_contexts else self._max_few_rows_chunk
        # By decode rows, and by the longest chunks of graphs.
        self._tiles_of_rows = dict[int, dict[_KernelKind, DecodeTiles]]()
        self._tiles_of_chunks = dict[int, dict[_KernelKind, ChunkTiles]]()
        self._max_num_pieces = max(map(self._most_pieces, range(1, max_num_seqs + 1)))
        # Graphs for tiles of few rows, and for tiles of many.
        short = sorted({self._max_few_rows_chunk, self._max_short_chunk} - {0})
        self._short_shapes = [StepShape(each) for each in short]
        pieces = [self._num_chunk_pieces(self._choose_chunk_tiles(each)) for each in short]
        self._max_chunk_pieces = max(pieces, default=0)
        lengths = (SHORT_CONTEXT, SHORT_CONTEXT + 1)
        self._tiles_of_prompts = [self._choose_prefill_tiles(each) for each in lengths]  # short contexts first
        self._prompt_shapes = self._shapes_of_prompts()
        self.captured_shapes: Sequence[StepShape] = [DECODE_ONLY, *self._short_shapes, *self._prompt_shapes]
        max_num_items = max_num_seqs + self._max_num_pieces
        self.storage = setup.storage or BlockStorage(spec, spec.head_major_block, device)
        self._caches = self.storage.layers
        compiled_kinds = zip(self._kernel_kinds, self._pairs, strict=True)
        self.layers_to_compile = list({kind: layer for layer, kind in enumerate(compiled_kinds)}.values())
        try:
            self._workspace = DecodeWorkspace(
                torch.empty(max_num_items, config.attn_size, device=device),
                torch.empty(max_num_items, config.num_heads, device=device),
                torch.zeros(max_num_items, most_kv_heads, dtype=torch.int32, device=device),
            )
            self._chunk_workspace = self._make_chunk_workspace(most_kv_heads, device)
            self._angles: RopeAngles | StreamingAngles
            if options.num_sink_tokens:
                last_place = options.num_sink_tokens + spec.window - 1
                self._angles = StreamingAngles(config, last_place, max_num_tokens, device)
            else:
                self._angles = RopeAngles(angles_config, max_model_len, max_num_tokens, device)
            self._upload = StepUpload(self._max_num_entries(max_num_items, max_model_len), device)
        except RuntimeError as error:  # includes torch.OutOfMemoryError
            raise CapacityError(
                f"{spec.num_blocks} KV blocks ({spec.num_bytes} bytes) and workspaces do not fit on {device}: {error}"
            ) from error
        if device.type == "cuda" and min(max_num_tokens, max_model_len) > 1:  # not in Triton's interpreter
            self._compile_prompts(max_model_len)

    def captured_shape(self, step: StepMetadata) -> StepShape | None:
        """Which of `captured_shapes` the step's graph has; None: none has it."""
        num_rows, num_tokens = len(step.positions), step.num_tokens
        if _is_decode_only(step):
            return DECODE_ONLY
        if self._later_rows(step) is not None:
            return None
        if num_tokens.min() > max(1, self._max_short_chunk):  # as a prompt that comes alone
            return self._shape_of_prompts(num_rows, len(num_tokens), 0, step.context_lens.max())
        is_split, is_decode = self._is_split(step), num_tokens == 1
        num_prompts = len(num_tokens) - np.count_nonzero(is_split | is_decode)
        if not num_prompts:
            if num_rows > MAX_CAPTURED_CHUNK_ROWS:
                return None
            longest = int(num_tokens.max())
            fitting = (each for each in self._short_shapes if longest <= each.chunk)
            return next((each for each in fitting if len(num_tokens) <= self._max_captured_seqs(each.chunk)), None)
        num_decode_rows = np.count_nonzero(is_decode)
        if num_prompts + num_decode_rows < len(num_tokens):  # some are split
            return None
        return self._shape_of_prompts(num_rows, num_prompts, num_decode_rows, step.context_lens[~is_decode].max())

    def _shape_of_prompts(
        self, num_rows: int, num_prompts: int, num_decode_rows: int, max_context_len: int
    ) -> StepShape | None:
        """That of a step of so many rows, in which no context is split. max_context_len: of its prompts"""
        if num_rows > MAX_CAPTURED_PROMPT_ROWS or num_prompts > _MAX_CAPTURED_PROMPTS:
            return None
        is_long = max_context_len > SHORT_CONTEXT
        fitting = (each for each in self._prompt_shapes if num_decode_rows <= each.num_decode_rows)
        return next((each for each in fitting if is_long <= each.has_long_contexts), None)

    def _shapes_of_prompts(self) -> list[StepShape]:
        """Without decode rows and with some; for short contexts and for any, if they have other tiles."""
        if self._max_num_tokens <= MAX_CAPTURED_CHUNK_ROWS or self._config.attention.num_sink_tokens:
            return []
        short, long = self._tiles_of_prompts
        most = min(self._max_num_seqs, _MAX_DECODE_ROWS_BESIDE_PROMPTS)
        lengths = (False, True) if short != long else (True,)
        return [StepShape(MAX_CAPTURED_PROMPT_ROWS, num, is_long) for num in (0, most) for is_long in lengths]

    def _max_captured_seqs(self, chunk: int) -> int:
        """The most sequences in a graph of chunks of up to `chunk` tokens: tiles of many rows are too large for one."""
        return _MAX_LONGER_CHUNKS if chunk > self._max_few_rows_chunk else MAX_CAPTURED_CHUNK_ROWS

    def _is_split(self, step: StepMetadata) -> np.ndarray:
        """Whose contexts are split, bool [num_seqs]: those of chunks of few rows, and long contexts of short chunks."""
        is_long = step.context_lens >= self._shortest_split_context
        longest = np.where(is_long, self._max_short_chunk, self._max_few_rows_chunk)
        is_split = (step.num_tokens > 1) & (step.num_tokens <= longest)
        if (num_later := self._later_rows(step)) is not None:  # which the prefill kernel alone can see
            is_split &= np.maximum.reduceat(num_later, np.cumsum(step.num_tokens) - step.num_tokens) == 0
        return is_split

    def _later_rows(self, step: StepMetadata) -> np.ndarray | None:
        """How many tokens after each it sees, int32 [num_tokens]; None: none sees any."""
        if step.num_later is None or not self._config.attention.sees_spans or not step.num_later.any():
            return None
        return step.num_later

    def use_learned(self, learned: Learned) -> None:
        """Sets the scales of FP8 layers and learned sinks, in place: captured graphs read them."""
        if learned.scales is not None:
            self.storage.use_scales(learned.scales)
        if learned.sinks:
            self._sinks[:, : self._config.num_heads].copy_(torch.tensor(learned.sinks))

    def begin_step(
        self, step: StepMetadata, padded_num_rows: int | None = None, shape: StepShape = DECODE_ONLY
    ) -> None:
        """Splits the kernels' work into items and sends them to the device."""
        num_seqs, num_tokens = len(step.num_tokens), len(step.positions)
        padded = num_seqs if padded_num_rows is None or shape.chunk > 1 else padded_num_rows
        if padded > self._max_num_seqs or num_tokens > self._max_num_tokens:
            raise CapacityError(
                f"a step has {padded} sequences and {num_tokens} tokens, the attention backend was made for"
                f" {self._max_num_seqs} and {self._max_num_tokens}"
            )
        self._upload.begin()
        self._decode_items, self._prefills, self._short_chunks = None, [], None
        if shape.chunk > 1:
            assert padded_num_rows is not None and padded_num_rows >= num_tokens, "no room for the step"
            if shape.has_prompts:
                self._begin_prompts(step, padded_num_rows, shape)
            else:
                self._begin_chunks(step, padded_num_rows, shape.chunk)
        else:
            assert padded == num_seqs or (_is_decode_only(step) and padded > num_seqs), "no room for the step"
            self._begin_mixed(step, padded)
        self._upload.send()
        self._angles.compute()

    def _begin_mixed(self, step: StepMetadata, padded: int) -> None:
        """The inputs of a step of decode rows and prompts; a graph can have it if it is decode-only."""
        upload = self._upload
        # The arrays that a graph reads come first, so that their addresses depend only on `padded`.
        num_pieces = self._num_pieces(padded)
        num_items = padded + num_pieces
        decode_items = {kind: upload.reserve((num_items, NUM_FIELDS)) for kind in self._distinct_item_kinds}
        parts = step.parts(self._spec.num_groups)
        self._block_tables, table_starts = write_block_tables(parts, self._block_size, self._upload)
        angle_rows = self._angles.write(step, upload)
        by_group = list(zip(parts, table_starts, strict=True))
        decodes = [_decode_rows(part, starts, angle_rows, padded) for part, starts in by_group]
        if len(decodes[0].rows):
            self._write_decode(decodes, decode_items, padded)
        if not _is_decode_only(step):
            rows, num_later = self._send(angle_rows), self._later_rows(step)
            later = None if num_later is None else (num_later, self._send(num_later))
            chunks = [_chunk_rows(part, starts) for part, starts in by_group]
            is_split = self._is_split(step)
            is_unsplit = (step.num_tokens > 1) & ~is_split
            self._prefills = [
                self._write_prefill(part, each.select(is_unsplit), rows, later)
                for part, each in zip(parts, chunks, strict=True)
            ]
            if is_split.any():
                self._short_chunks = self._write_short_chunks([each.select(is_split) for each in chunks])

    def _begin_prompts(self, step: StepMetadata, padded: int, shape: StepShape) -> None:
        """The inputs of a step of prompts, and of decode rows beside them, as its graph reads them."""
        upload, num_tokens, num_decode_rows = self._upload, len(step.positions), shape.num_decode_rows
        parts = step.parts(self._spec.num_groups)
        tiles = self._tiles_of_prompts[shape.has_long_contexts]
        # The arrays that a graph reads come first, so that their addresses depend only on `padded` and `shape`.
        decode_items = {}
        if num_decode_rows:
            num_items = num_decode_rows + self._num_pieces(num_decode_rows)
            decode_items = {kind: upload.reserve((num_items, NUM_FIELDS)) for kind in self._distinct_item_kinds}
        sizes = dict.fromkeys(each.block_m for each in tiles.values())
        items = [
            {size: upload.reserve((self._max_prefill_items(padded, size), NUM_FIELDS)) for size in sizes}
            for _ in parts
        ]
        slots = [upload.reserve((padded,)) for _ in parts]
        host_rows, rows = upload.reserve((padded,))
        self._block_tables, table_starts = write_block_tables(parts, self._block_size, self._upload)
        angle_rows = self._angles.write(step, upload)
        host_rows[:num_tokens] = angle_rows
        host_rows[num_tokens:] = 0
        by_group = list(zip(parts, table_starts, strict=True))
        if num_decode_rows:
            decodes = [_single_rows(part, starts, angle_rows) for part, starts in by_group]
            self._write_decode(decodes, decode_items, num_decode_rows)
        is_prompt = step.num_tokens > 1
        for (part, starts), (host_slots, on_device), by_size in zip(by_group, slots, items, strict=True):
            chunks = _chunk_rows(part, starts)
            host_slots[:num_tokens] = part.slot_mapping
            host_slots[num_tokens:] = -1
            if num_decode_rows:
                host_slots[:num_tokens][~is_prompt.repeat(step.num_tokens)] = -1
                chunks = chunks.select(is_prompt)
            for size, (host, _) in by_size.items():
                used = prefill_items(chunks, size)
                host[: len(used)] = used
                host[len(used) :, 0] = NO_ITEM
            on_devices = {size: array for size, (_, array) in by_size.items()}
            self._prefills.append(_Prefill(on_device, rows, on_devices, tiles))

    def _max_prefill_items(self, num_rows: int, size: int) -> int:
        return num_rows // size + min(num_rows, _MAX_CAPTURED_PROMPTS)

    def _write_decode(
        self,
        decodes: Sequence[DecodeRows],
        items: dict[_ItemKind, tuple[np.ndarray, torch.Tensor]],
        padded: int,
    ) -> None:
        """The inputs of the decode kernel for up to `padded` rows; `decodes` are those of each group."""
        self._decode_tiles = self._choose_decode_tiles(padded)
        piece_tile = max(tiles.block_n for tiles in self._decode_tiles.values())
        num_pieces = self._num_pieces(padded)
        for kind, (host, _) in items.items():
            fill_decode_items(host, decodes[kind.group], kind.window, num_pieces, piece_tile, appends=kind.appends)
        self._decode_items = {kind: on_device for kind, (_, on_device) in items.items()}

    def _begin_chunks(self, step: StepMetadata, padded: int, chunk: int) -> None:
        """The inputs of a step whose rows are all of short chunks, of up to `chunk` tokens, as its graph reads them."""
        upload, num_tokens = self._upload, len(step.positions)
        parts = step.parts(self._spec.num_groups)
        tiles = self._tiles_of_chunks.get(chunk) or self._choose_chunk_tiles(chunk)
        self._tiles_of_chunks[chunk] = tiles
        # The arrays that a graph reads come first, so that their addresses depend only on `padded` and `chunk`.
        items = {}
        for size in dict.fromkeys(each.num_tokens for each in tiles.values()):
            num_blocks = min(padded, padded // size + min(padded, self._max_captured_seqs(chunk)))
            shape = (num_blocks + self._num_chunk_pieces(tiles), NUM_FIELDS)
            items |= {(kind, size): upload.reserve(shape) for kind in self._distinct_item_kinds}
        slots = [upload.reserve((padded,)) for _ in parts]
        host_rows, rows = upload.reserve((padded,))
        self._block_tables, table_starts = write_block_tables(parts, self._block_size, self._upload)
        host_rows[:num_tokens] = self._angles.write(step, upload)
        host_rows[num_tokens:] = 0
        for part, (host, _) in zip(parts, slots, strict=True):
            host[:num_tokens] = part.slot_mapping
            host[num_tokens:] = -1
        chunks = [_chunk_rows(part, starts) for part, starts in zip(parts, table_starts, strict=True)]
        for (kind, size), (host, _) in items.items():
            used = self._chunk_items(chunks, kind, size, tiles)
            host[: len(used)] = used
            host[len(used) :, 0] = NO_ITEM
        self._prefills = [_Prefill(on_device, rows, {}, {}) for _, on_device in slots]
        on_device = {key: array for key, (_, array) in items.items()}
        self._short_chunks = _ShortChunks(tiles, on_device, appends=chunk <= self._max_few_rows_chunk)

    def forward(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """Launches the kernels of one layer. `qkv` and `out` may have more rows than the step."""
        cache, scales, scores = self._caches[layer], self.storage.scales[layer], self._scores[layer]
        window, angles = self._spec.windows[layer], self._angles.tables[layer]
        heads, pairs, kernel_kind = self._heads[layer], self._pairs[layer], self._kernel_kinds[layer]
        qkv_size, attn_size = self._widths[layer]
        qkv, out = rows_of_layer(qkv, qkv_size), rows_of_layer(out, attn_size)
        if self._prefills:
            prefill = self._prefills[self._item_kinds[layer].group]
            rows = prefill.angle_rows
            appends = self._short_chunks is not None and self._short_chunks.appends
            if heads.kv_layer is None and not appends:
                self._kernels.append(qkv, cache, scales, angles, rows, prefill.slots, pairs)
            if prefill.tiles:
                tiles = prefill.tiles[kernel_kind]
                further = {} if prefill.num_later is None else {"num_later": prefill.num_later}
                self._kernels.attend(
                    qkv,
                    out,
                    cache,
                    scales,
                    angles,
                    rows,
                    prefill.items[tiles.block_m],
                    self._block_tables,
                    window,
                    tiles,
                    scores,
                    pairs,
                    **further,
                )
            if self._short_chunks is not None:
                chunk_tiles = self._short_chunks.tiles[kernel_kind]
                self._kernels.attend_short_chunks(
                    qkv,
                    out,
                    cache,
                    scales,
                    angles,
                    rows,
                    self._short_chunks.items[self._item_kinds[layer], chunk_tiles.num_tokens],
                    self._block_tables,
                    self._chunk_workspace,
                    window,
                    chunk_tiles,
                    scores,
                    pairs,
                    prefill.slots if appends and heads.kv_layer is None else None,
                )
        # Last, as it takes longest: with lanes, short kernels behind it would wait for the other lane's longest one.
        if self._decode_items is not None:
            items = self._decode_items[self._item_kinds[layer]]
            self._kernels.decode(
                qkv,
                out,
                cache,
                scales,
                angles,
                items,
                self._block_tables,
                self._workspace,
                self._decode_tiles[kernel_kind],
                scores,
                pairs,
            )

    @torch.inference_mode()
    def _compile_prompts(self, max_model_len: int) -> None:
        """Runs the prefill kernels on a sequence in the null block, so that no request waits for the compiler."""
        kinds = zip(self._item_kinds, self._kernel_kinds, self._pairs, strict=True)
        layers = {kind: layer for layer, kind in enumerate(kinds)}.values()
        chunk = self._max_short_chunk + 2
        chunks = {(chunk, context_len) for context_len in (SHORT_CONTEXT, SHORT_CONTEXT + 1)}
        chunks.add((MAX_CAPTURED_PROMPT_ROWS + 1, MAX_CAPTURED_PROMPT_ROWS + 1))  # which have tiles of many rows
        if self._max_short_chunk:  # which have tiles of few and of many rows
            chunks |= {(2, 2), (self._max_short_chunk, max(self._max_short_chunk, self._shortest_split_context))}
        most, device = min(self._max_num_tokens, max_model_len), self._caches[0].device
        for num_tokens, context_len in {(min(each, most), min(length, max_model_len)) for each, length in chunks}:
            qkv = torch.zeros(num_tokens, self._config.qkv_size, dtype=self._dtype, device=device)
            out = torch.empty(num_tokens, self._config.attn_size, dtype=self._dtype, device=device)
            counts, lengths = np.full(1, num_tokens), np.full(1, context_len)
            width, step = -(-context_len // self._block_size), None
            for group in reversed(range(self._spec.num_groups)):
                table = np.full((1, width), self._spec.num_blocks_of(group), np.int32)
                step = build_step_metadata(counts, lengths - counts, lengths, table, self._block_size, windows=step)
            runs: list[tuple[StepMetadata, int | None, StepShape]] = [(step, None, DECODE_ONLY)]
            # Which are kernels of their own:
            if self._config.attention.sees_spans and num_tokens > 1:
                later = np.eye(1, num_tokens, dtype=np.int32)[0]
                runs.append((replace(step, num_later=later), None, DECODE_ONLY))
            if 1 < num_tokens <= self._max_few_rows_chunk:
                runs.append((step, num_tokens, self._short_shapes[0]))
            for each in runs:
                self.begin_step(*each)
                for layer in layers:
                    self.forward(layer, qkv, out)
        torch.cuda.synchronize()  # steps run on another stream

    def _choose_decode_tiles(self, num_seqs: int) -> dict[_KernelKind, DecodeTiles]:
        """Depends on `num_seqs` alone, as what a graph launches must."""
        if (known := self._tiles_of_rows.get(num_seqs)) is not None:
            return known
        tiles = self._tiles_of_rows[num_seqs] = {
            kind: self._kernels.choose_decode_tiles(
                self._dtype,
                kind.cache_dtype,
                self._config.num_heads // kind.num_kv_heads,
                kind.head_dim,
                num_seqs * kind.num_kv_heads / self._num_sms,
            )
            for kind in self._distinct_kernel_kinds
        }
        return tiles

    def _choose_prefill_tiles(self, max_context_len: int, num_rows: int = 0) -> dict[_KernelKind, PrefillTiles]:
        """`num_rows`: of the step, if it may be too large for a graph."""
        return {
            kind: self._kernels.choose_prefill_tiles(
                kind.head_dim,
                self._dtype,
                kind.cache_dtype,
                self._config.num_heads // kind.num_kv_heads,
                max_context_len,
                num_rows > MAX_CAPTURED_PROMPT_ROWS,
            )
            for kind in self._distinct_kernel_kinds
        }

    def _num_pieces(self, num_seqs: int) -> int:
        """The number of pieces that all contexts together are split into. Each sequence rounds its part up.

        With fewer sequences each gets more pieces, and all together no more than run at once. With many, only sequences
        much longer than the others are split.
        """
        most = self._most_pieces(num_seqs)
        return most if num_seqs >= most else max(most - num_seqs + 1, most // 2)

    def _most_pieces(self, num_seqs: int) -> int:
        num_programs = min(tiles.num_programs for tiles in self._choose_decode_tiles(num_seqs).values())
        return max(1, num_programs * self._num_sms // self._programs_per_item)

    def _write_prefill(
        self,
        step: StepMetadata,
        unsplit: ChunkRows,
        angle_rows: torch.Tensor,
        later: tuple[np.ndarray, torch.Tensor] | None,
    ) -> _Prefill:
        """later: how many tokens after each row it sees, on the host and on the device; None: no row sees any"""
        is_prefill = (step.num_tokens > 1).repeat(step.num_tokens)
        slots = self._send(np.where(is_prefill, step.slot_mapping, -1))
        if not len(unsplit.num_tokens):
            return _Prefill(slots, angle_rows, {}, {})
        tiles = self._choose_prefill_tiles(int(unsplit.context_lens.max()), len(step.positions))
        sizes = dict.fromkeys(each.block_m for each in tiles.values())
        host, on_device = later or (None, None)
        items = {size: self._send(prefill_items(unsplit, size, host)) for size in sizes}
        return _Prefill(slots, angle_rows, items, tiles, on_device)

    def _write_short_chunks(self, short: Sequence[ChunkRows]) -> _ShortChunks:
        """`short`: those whose contexts are split, for each group."""
        tiles = self._choose_chunk_tiles(int(short[0].num_tokens.max()))
        sizes = dict.fromkeys(each.num_tokens for each in tiles.values())
        keys = [(kind, size) for kind in self._distinct_item_kinds for size in sizes]
        return _ShortChunks(tiles, {key: self._send(self._chunk_items(short, *key, tiles)) for key in keys})

    def _chunk_items(
        self, chunks: Sequence[ChunkRows], kind: _ItemKind, size: int, tiles: dict[_KernelKind, ChunkTiles]
    ) -> np.ndarray:
        piece_tile = max(each.block_n for each in tiles.values())
        min_piece = max(_KEYS_OF_PIECE, _KEYS_PER_QUERY * max(each.num_rows for each in tiles.values()))
        return chunk_items(chunks[kind.group], kind.window, size, self._num_chunk_pieces(tiles), min_piece, piece_tile)

    def _num_chunk_pieces(self, tiles: dict[_KernelKind, ChunkTiles]) -> int:
        num_programs = min(each.num_programs for each in tiles.values())
        return max(1, num_programs * self._num_sms // self._fewest_kv_heads)

    def _choose_chunk_tiles(self, max_num_tokens: int) -> dict[_KernelKind, ChunkTiles]:
        return {
            kind: choose_chunk_tiles(
                kind.head_dim,
                self._dtype,
                kind.cache_dtype,
                self._config.num_heads // kind.num_kv_heads,
                max_num_tokens,
            )
            for kind in self._distinct_kernel_kinds
        }

    def _max_num_entries(self, max_num_items: int, max_model_len: int) -> int:
        """The most int32 elements that a step sends to the device. max_num_items: of decode rows, for each kind"""
        num_groups, num_tokens = self._spec.num_groups, self._max_num_tokens
        num_item_kinds, num_kernel_kinds = len(self._distinct_item_kinds), len(self._distinct_kernel_kinds)
        num_chunk_items = num_tokens + self._max_chunk_pieces if self._max_short_chunk else 0
        return (
            num_item_kinds * max_num_items * NUM_FIELDS
            + num_groups * self._max_num_seqs * -(-max_model_len // self._block_size)  # block tables
            # Prefill items, and arrays with one element per token.
            + num_tokens * (num_groups * num_kernel_kinds * NUM_FIELDS + 5 + num_groups)
            + num_item_kinds * num_kernel_kinds * num_chunk_items * NUM_FIELDS
            + TABLE_SLACK
        )

    def _make_chunk_workspace(self, most_kv_heads: int, device: torch.device) -> DecodeWorkspace | None:
        if not self._max_short_chunk:
            return None
        num_items = self._max_chunk_pieces  # that are split, see `chunk_items`
        rows, sizes = [], []
        for kind, tiles in self._choose_chunk_tiles(self._max_short_chunk).items():
            rows.append(kind.num_kv_heads * tiles.num_rows)
            sizes.append(rows[-1] * kind.head_dim)
        return DecodeWorkspace(
            torch.empty(num_items, max(sizes), device=device),
            torch.empty(num_items, max(rows), device=device),
            torch.zeros(num_items, most_kv_heads, dtype=torch.int32, device=device),
        )

    def _send(self, array: np.ndarray) -> torch.Tensor:
        """Puts an array into the step's upload."""
        host, device = self._upload.reserve(array.shape)
        host[...] = array
        return device


def _check(setup: BackendSetup) -> None:
    """Raises ConfigError if the cache has neither the model's dtype nor 8 bits."""
    config, spec, options = setup.config, setup.spec, setup.config.attention
    if not set(spec.dtypes) <= {setup.dtype, torch.float8_e4m3fn, torch.int8}:
        raise ConfigError(
            "the Triton kernels need a KV cache of float8_e4m3fn, int8 or the model's"
            f" {setup.dtype}, this one is {spec.dtype}"
        )
    assert set(spec.dtypes) == {setup.dtype} or config.head_dim % 4 == 0, "`select_backend` refuses this"
    assert (spec.num_blocks + 1) * spec.block_size < 2**31, "slots are int32"
    assert not options.alibi_slopes or set(config.layer_ropes) == {None}, "with ALiBi, angle rows are positions"
    assert options.scale is not None or not options.layer_heads, "heads that differ have a scale of their own"


def _scores_of_layers(setup: BackendSetup, sinks: torch.Tensor | None) -> list[ScoreOptions]:
    """What each layer does to its scores. sinks: learned ones, [num_layers, at least num_heads]; None: it has none"""
    config, options = setup.config, setup.config.attention
    slopes = torch.tensor(options.alibi_slopes, device=setup.device) if options.alibi_slopes else None
    scores = ScoreOptions(options.scale or config.head_dim**-0.5, options.softcap or 0.0, slopes)
    if options.num_sink_tokens:
        scores = replace(scores, num_sink_tokens=options.num_sink_tokens, place_rows=setup.max_num_tokens)
    return [scores] * config.num_layers if sinks is None else [replace(scores, sinks=each) for each in sinks]


def write_block_tables(
    parts: Sequence[StepMetadata], block_size: int, upload: StepUpload
) -> tuple[torch.Tensor, list[np.ndarray]]:
    """All block tables in one flat array on the device, and for each group the start of each, int32 [num_seqs]."""
    flat, all_starts, size = [], [], 0
    for part in parts:
        tables = part.block_tables
        num_seqs, width = tables.shape
        counts = -(-part.context_lens // block_size)
        if tables.size > _RAGGED_TABLES_FROM and 4 * counts.sum() < tables.size:
            is_used = np.arange(width) < counts[:, None]
            tables, starts = tables[is_used], (np.cumsum(counts) - counts).astype(np.int32)
        else:
            starts = np.arange(num_seqs, dtype=np.int32) * width
        flat.append(tables.reshape(-1))
        all_starts.append(starts + np.int32(size))
        size += tables.size
    # At least one element: an empty tensor has no address, and graphs are captured with empty steps.
    host, device = upload.reserve((max(size, 1),))
    np.concatenate(flat, out=host[:size])
    return device, all_starts


def pairs_of(rope: RopeConfig, head_dim: int, rotates_pairs: bool) -> RotaryPairs | None:
    """None: whole heads, dimensions half a head apart."""
    is_plain = rope.rotary_dim == head_dim and not rotates_pairs
    return None if is_plain else RotaryPairs(rope.rotary_dim, rotates_pairs)


def _is_decode_only(step: StepMetadata) -> bool:
    """Whether every sequence has one token, so that one launch per layer runs the step."""
    return len(step.positions) == len(step.num_tokens)


def _chunk_rows(step: StepMetadata, table_starts: np.ndarray) -> ChunkRows:
    """The rows of all sequences."""
    return ChunkRows(step.num_tokens.cumsum() - step.num_tokens, step.num_tokens, step.context_lens, table_starts)


def _decode_rows(
    step: StepMetadata, table_starts: np.ndarray, angle_rows: np.ndarray, padded_num_rows: int
) -> DecodeRows:
    """The rows of sequences with one token, then padding rows."""
    num_tokens = step.num_tokens
    num_padding = padded_num_rows - len(num_tokens)
    if _is_decode_only(step):
        rows = np.arange(padded_num_rows, dtype=np.int32)

        def pad(array: np.ndarray) -> np.ndarray:
            return np.concatenate((array, np.zeros(num_padding, np.int32))) if num_padding else array

        columns = (step.context_lens, table_starts, step.slot_mapping, angle_rows)
        return DecodeRows(rows, *map(pad, columns))
    return _single_rows(step, table_starts, angle_rows)


def _single_rows(step: StepMetadata, table_starts: np.ndarray, angle_rows: np.ndarray) -> DecodeRows:
    """The rows of sequences with one token, without padding."""
    num_tokens = step.num_tokens
    seqs = (num_tokens == 1).nonzero()[0]
    rows = (num_tokens.cumsum() - num_tokens)[seqs]
    by_seq = (step.context_lens[seqs], table_starts[seqs])
    return DecodeRows(rows, *by_seq, step.slot_mapping[rows], angle_rows[rows])


def num_sms_of(device: torch.device) -> int:
    """The multiprocessors of a GPU."""
    if device.type == "cpu":  # Triton's interpreter, in tests
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count
