"""Paged attention in plain torch operations: the default on a CPU and the reference for every kernel.

All sequences of a step are processed together: their blocks are gathered, padded and masked. `begin_step` prepares
everything that depends on the step but not on the layer. A `LayerCache` stores and reads the keys and values of one
layer, by the dtype of the cache; the kernels of other backends are compared with these definitions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from services.attn_worker.cache.block_storage import BlockStorage
from services.attn_worker.cache.step_metadata import StepMetadata
from services.attn_worker.layers import BackendSetup
from services.attn_worker.layers.mha.padded_groups import PaddedGroup, build_padded_groups
from services.channel import rows_of_layer
from services.common.attention.learned import Learned
from services.common.attention.relative_bias import causal_buckets
from services.common.attention.rope import RotaryEmbedding, UnboundedRotaryEmbedding
from services.common.errors import ConfigError
from services.common.model_config import LayerHeads, RopeConfig

FP8_MAX = 448.0  # the largest number of e4m3
INT8_MAX = 127
_PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class _Group:
    """A padded group on the device."""

    num_seqs: int
    rows: slice | torch.Tensor  # of qkv: one slice, or int64 [group_size * max_tokens]
    valid: torch.Tensor | None  # int64, indexes of the unpadded `rows`; None: all
    out_rows: torch.Tensor | None  # int64, their rows in out; None: the slice `rows`
    max_tokens: int
    max_context: int
    blocks: torch.Tensor  # int64 [group_size * blocks per sequence]
    masks: dict[int | None, torch.Tensor | None]  # by window; see _masks


@dataclass(frozen=True, slots=True)
class _Context:
    """What a group's sequences have in the cache of a layer; keys and values are views of the gathered blocks."""

    gathered: torch.Tensor  # [len(blocks), elements of a block]
    keys: torch.Tensor  # [group_size, num_kv_heads, max_context, head_dim]
    values: torch.Tensor  # the same shape, also if they are a part of the keys: attention's output is cut then


@dataclass(frozen=True, slots=True)
class _Rotation:
    """RoPE of a step's rows, in place: each dimension times cos, plus its partner times sin."""

    heads: torch.Tensor  # [num_rows, heads of q and k, rotary_dim], a view
    swapped: tuple[torch.Tensor, torch.Tensor]  # views, which side by side are the partners of the dimensions
    cos: torch.Tensor  # [num_rows, 1, rotary_dim]
    sin: torch.Tensor  # negative for the first dimension of each pair
    has_pairs: bool  # partners are next to each other, not half a head apart

    def apply(self) -> None:
        partners = torch.stack(self.swapped, dim=-1).flatten(-2) if self.has_pairs else torch.cat(self.swapped, dim=-1)
        self.heads.mul_(self.cos).addcmul_(partners, self.sin)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Workspaces and rotations of a step for all layers with the same heads: layers use them one after the other."""

    qkv: torch.Tensor  # [num_rows, qkv_size]
    query: torch.Tensor  # a view
    key_value: torch.Tensor  # a view; of no columns if the layers read the keys and values of others
    out_size: int  # width of attention's output
    rotations: dict[RopeConfig, _Rotation]


@dataclass(frozen=True, slots=True)
class _Part:
    """A step in the blocks of one group of layers."""

    slots: torch.Tensor  # int64 [num_rows]
    groups: list[_Group]
    contexts: dict[int, list[_Context]]  # by the layers' kind of heads; for each padded group


class TorchAttention:
    """An AttentionBackend for any torch device, in float32, bfloat16 or float16.

    The cache holds the k heads and v heads of a token side by side (`KVCacheSpec.token_major_block`), so that one copy
    appends both and one gather reads both. Its dtype may be another of these three than the model's, or 8 bits.
    """

    def __init__(self, setup: BackendSetup) -> None:
        """Raises CapacityError if memory is too small, ConfigError for a cache of another dtype."""
        config, spec, device, max_model_len = setup.config, setup.spec, setup.device, setup.max_model_len
        self._config = config
        self._spec = spec
        self._block_size = spec.block_size
        self._dtype = setup.dtype
        self._device = device
        # Layers that read the keys of others are alike, whichever they read.
        heads = [each if each.kv_layer is None else replace(each, kv_layer=0) for each in config.layer_heads]
        self._kinds = list(dict.fromkeys(heads))  # layers of one kind have the same heads
        self._layer_kinds = [self._kinds.index(each) for each in heads]
        self._kind_ropes: list[set[RopeConfig]] = [set() for _ in self._kinds]
        for kind, rope in zip(self._layer_kinds, config.layer_ropes, strict=True):
            self._kind_ropes[kind].update([] if rope is None else [rope])
        self._layer_ropes = config.layer_ropes
        self._num_sink_tokens, self._value_dim = config.attention.num_sink_tokens, config.attention.value_dim
        self._ropes: dict[RopeConfig, RotaryEmbedding | UnboundedRotaryEmbedding] = {
            rope: UnboundedRotaryEmbedding(rope, device)
            if self._num_sink_tokens
            else RotaryEmbedding(rope, max_model_len, device)
            for rope in set().union(*self._kind_ropes)
        }
        self._sinks: torch.Tensor | None = None  # float32 [num_layers, num_heads], of models that have them
        # [num_heads, max_model_len], by distance to a key before the query; None: the model has no relative bias
        self._relative_bias: torch.Tensor | None = None
        self._max_model_len = max_model_len
        self._slopes = torch.tensor(config.attention.alibi_slopes, dtype=torch.float32, device=device)
        self._num_groups = spec.num_groups
        self._layer_groups = [spec.group_of(layer) for layer in range(spec.num_layers)]
        # By group of layers: their windows, and their kinds of heads.
        self._group_options: tuple[tuple[set[int | None], set[int]], ...] = ((set(), set()), (set(), set()))
        for group, window, layer_kind in zip(self._layer_groups, spec.windows, self._layer_kinds, strict=True):
            self._group_options[group][0].add(window)
            self._group_options[group][1].add(layer_kind)
        self.storage = setup.storage or BlockStorage(spec, spec.token_major_block, device)
        self._layers = [
            make_layer_cache(*pair) for pair in zip(self.storage.layers, self.storage.scales, strict=True)
        ]
        self._workspaces: dict[str, torch.Tensor] = {}

    def use_learned(self, learned: Learned) -> None:
        """Sets the scales of FP8 layers, learned sinks, and a relative bias, if the model has any."""
        if learned.scales is not None:
            self.storage.use_scales(learned.scales)
        if learned.sinks:
            self._sinks = torch.tensor(learned.sinks, dtype=torch.float32, device=self._device)
        if learned.relative_bias:
            options = self._config.attention.relative_bias
            assert options is not None, "`read_relative_bias` refuses this"
            table = torch.tensor(learned.relative_bias, dtype=torch.float32, device=self._device)
            self._relative_bias = table[causal_buckets(options, self._max_model_len, self._device)].T.contiguous()

    def begin_step(self, step: StepMetadata) -> None:
        """Computes the angles, slots, gather indices and masks of the step."""
        positions, rope_lens = self._to_device(step.positions), self._to_device(step.rope_lens)
        on_axes = None if step.rope_positions is None else self._to_device(step.rope_positions)
        angles = {
            rope: embedding(on_axes if rope.axes and on_axes is not None else positions, rope_lens)
            for rope, embedding in self._ropes.items()
        }
        parts = step.parts(self._num_groups)
        num_later = step.num_later if self._config.attention.sees_spans else None
        self._parts = [self._prepare_part(group, part, num_later) for group, part in enumerate(parts)]
        kinds = zip(self._kinds, self._kind_ropes, strict=True)
        self._rows = [
            self._prepare_rows(kind, len(positions), {rope: angles[rope] for rope in ropes}) for kind, ropes in kinds
        ]
        self._prepare_sinks(step, positions, rope_lens)

    def forward(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """Rotates, appends and attends with torch operations."""
        # This copy has no NaN or infinity. In the cache they would spread through the masked padding to every sequence
        # that later owns the block. The dense stroke's residual still carries them.
        rows = self._rows[self._layer_kinds[layer]]
        out = rows_of_layer(out, rows.out_size)
        torch.nan_to_num(rows_of_layer(qkv, rows.qkv.shape[1]), 0.0, 0.0, 0.0, out=rows.qkv)
        rope = self._layer_ropes[layer]
        if self._sink_query is not None:
            self._sink_query.copy_(rows.query)
            if rope is not None:
                self._sink_rotations[rope].apply()
        if rope is not None:
            rows.rotations[rope].apply()
        part = self._parts[self._layer_groups[layer]]
        if rows.key_value.shape[1]:
            self._layers[layer].append(part.slots, rows.key_value)
        self._attend(layer, part, rows.query, out)

    def _attend(self, layer: int, part: _Part, query: torch.Tensor, out: torch.Tensor) -> None:
        """query [num_rows, q_size], rotated -> out [num_rows, attn_size]. Keys and values are in the cache."""
        for group, context in zip(part.groups, part.contexts[self._layer_kinds[layer]], strict=True):
            self._attend_group(layer, group, context, query, out)

    def _attend_group(
        self, layer: int, group: _Group, context: _Context, query: torch.Tensor, out: torch.Tensor
    ) -> None:
        self._layers[layer].gather(group.blocks, context.gathered)
        mask = group.masks[self._spec.windows[layer]]
        is_slice = group.out_rows is None
        queries = [query] if self._sink_query is None else [query, self._sink_query]
        queries = [each[group.rows] if is_slice else each.index_select(0, group.rows) for each in queries]
        group_size, num_kv_heads, _, head_dim = context.keys.shape
        sinks = None
        if self._config.attention.has_sinks:
            sinks = self._sinks[layer].view(num_kv_heads if group.max_tokens == 1 else self._config.num_heads, -1, 1)
        if group.max_tokens == 1:
            # The q heads of a kv head are passed as query positions, so keys and values need not be repeated.
            queries = [each.view(group_size, num_kv_heads, -1, head_dim) for each in queries]
            attended = self._attention(*queries, keys=context.keys, values=context.values, mask=mask, sinks=sinks)
        else:
            shape = (group_size, group.max_tokens, -1, head_dim)
            queries = [each.view(shape).transpose(1, 2) for each in queries]
            attended = self._attention(
                *queries, keys=context.keys, values=context.values, mask=mask, sinks=sinks, is_causal=mask is None
            )
            attended = attended.transpose(1, 2)
        if self._value_dim is not None:
            attended = attended[..., -self._value_dim :]
        if is_slice:
            out[group.rows].view(attended.shape).copy_(attended)
        else:
            attended = attended.reshape(-1, out.shape[1])
            if group.valid is not None:
                attended = attended.index_select(0, group.valid)
            out.index_copy_(0, group.out_rows, attended)

    def _attention(
        self,
        query: torch.Tensor,
        sink_query: torch.Tensor | None = None,
        *,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """query [group_size, heads, queries, head_dim], mask as by `_masks` -> the same shape as query.

        sink_query: the query for the first tokens, by `_prepare_sinks`; None: as for all others. sinks: logits that
        broadcast to the scores, [heads, queries or 1, 1]; None: the model has none.
        """
        options, has_groups = self._config.attention, query.shape[1] > keys.shape[1]
        if options.softcap is None and sinks is None and sink_query is None:
            return scaled_dot_product_attention(
                query,
                keys,
                values,
                attn_mask=mask,
                is_causal=is_causal,
                scale=options.scale,
                enable_gqa=has_groups,
            )
        if has_groups:
            repeats = query.shape[1] // keys.shape[1]
            keys, values = (each.repeat_interleave(repeats, dim=1) for each in (keys, values))
        scale = options.scale or query.shape[-1] ** -0.5
        scores = query.float() @ keys.float().transpose(-1, -2) * scale
        if sink_query is not None:
            first_keys = keys[:, :, : self._num_sink_tokens].float()
            scores[..., : first_keys.shape[2]] = sink_query.float() @ first_keys.transpose(-1, -2) * scale
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        if is_causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=self._device).triu(1)
            scores = scores.masked_fill_(hidden, float("-inf"))
        elif mask is not None:
            scores += mask
        if sinks is not None:
            highest = torch.maximum(scores.amax(dim=-1, keepdim=True), sinks)
            weights = scores.sub_(highest).exp_()
            total = weights.sum(dim=-1, keepdim=True) + (sinks - highest).exp()
            return (weights @ values.float() / total).to(query.dtype)
        return (scores.softmax(dim=-1) @ values.float()).to(query.dtype)

    def _prepare_part(self, group: int, step: StepMetadata, num_later: np.ndarray | None) -> _Part:
        """`group`: that of the layers, which the step is for; num_later: of the step, for all groups."""
        windows, kinds = self._group_options[group]
        padded = build_padded_groups(step.num_tokens, step.context_lens)
        groups = [self._prepare(each, step.block_tables, windows, num_later) for each in padded]
        contexts = {kind: [self._prepare_context(self._kinds[kind], each) for each in groups] for kind in kinds}
        return _Part(self._to_device(step.slot_mapping), groups, contexts)

    def _prepare_rows(
        self, kind: LayerHeads, num_rows: int, angles: dict[RopeConfig, tuple[torch.Tensor, torch.Tensor]]
    ) -> _Rows:
        """angles: cos and sin of the step's rows."""
        qkv = self._workspace("qkv", num_rows, kind.qkv_size)
        heads = qkv[:, : kind.q_size + kind.kv_size].unflatten(-1, (-1, kind.head_dim))
        return _Rows(
            qkv=qkv,
            query=qkv[:, : kind.q_size],
            key_value=qkv[:, kind.q_size :],
            out_size=kind.attn_size,
            rotations={
                rope: self._rotation(heads[..., : rope.rotary_dim], *of_rope) for rope, of_rope in angles.items()
            },
        )

    def _prepare_context(self, kind: LayerHeads, group: _Group) -> _Context:
        num_stored_heads = (1 if kind.value_dim else 2) * kind.num_kv_heads
        gathered = self._workspace("gathered", len(group.blocks), self._block_size * num_stored_heads * kind.head_dim)
        heads = gathered.view(group.num_seqs, -1, num_stored_heads, kind.head_dim)
        heads = heads[:, : group.max_context].transpose(1, 2)
        return _Context(gathered, keys=heads[:, : kind.num_kv_heads], values=heads[:, -kind.num_kv_heads :])

    def _prepare_sinks(self, step: StepMetadata, positions: torch.Tensor, rope_lens: torch.Tensor) -> None:
        """The queries that meet the first tokens, if the text has become longer than what is seen of it.

        By StreamingLLM (arXiv:2309.17453) a token's position is its place in the cache: sinks 0 to S - 1, then W tokens
        with the query as the last one, at S + W - 1. Of rotated queries and keys only the distance counts. Among the W
        tokens it is the same in the text and in the cache, so keys are stored as usual, rotated by their position in
        the text. For the sinks alone, which are at the same place in both, the query is rotated by its place in the
        cache.
        """
        self._sink_query: torch.Tensor | None = None
        if not self._num_sink_tokens or (window := self._spec.window) is None:
            return
        last_place = self._num_sink_tokens + window - 1
        if not len(step.positions) or step.positions.max() <= last_place:
            return
        self._sink_query = self._workspace("sink_query", len(positions), self._config.q_size)
        heads, places = self._sink_query.unflatten(-1, (-1, self._config.head_dim)), positions.clamp(max=last_place)
        self._sink_rotations = {
            rope: self._rotation(heads[..., : rope.rotary_dim], *embedding(places, rope_lens))
            for rope, embedding in self._ropes.items()
        }

    def _rotation(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> _Rotation:
        """heads: a view [num_rows, num_heads, rotary_dim]; cos, sin float32 [num_rows, rotary_dim / 2]."""
        cos, sin = cos[:, None].to(self._dtype), sin[:, None].to(self._dtype)
        if self._config.attention.rotates_pairs:
            swapped = (heads[..., 1::2], heads[..., 0::2])
            return _Rotation(
                heads, swapped, cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(2), True
            )
        first, second = heads.chunk(2, dim=-1)
        return _Rotation(heads, (second, first), torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1), False)

    def _prepare(
        self,
        group: PaddedGroup,
        block_tables: np.ndarray,
        windows: set[int | None],
        num_later: np.ndarray | None,
    ) -> _Group:
        num_blocks = -(-group.max_context // self._block_size)
        if group.has_consecutive_rows:
            first_row = int(group.rows[0, 0])
            rows, valid, out_rows = slice(first_row, first_row + group.rows.size), None, None
        else:
            is_valid = group.is_valid.ravel()
            rows = self._to_device(group.rows.ravel())
            valid = None if is_valid.all() else self._to_device(np.flatnonzero(is_valid))
            out_rows = self._to_device(group.rows[group.is_valid])
        num_seqs, max_tokens = group.rows.shape
        return _Group(
            num_seqs=num_seqs,
            rows=rows,
            valid=valid,
            out_rows=out_rows,
            max_tokens=max_tokens,
            max_context=group.max_context,
            blocks=self._to_device(block_tables[group.seqs, :num_blocks].ravel()),
            masks=self._masks(group, windows, None if num_later is None else num_later[group.rows]),
        )

    def _masks(
        self, group: PaddedGroup, windows: set[int | None], num_later: np.ndarray | None
    ) -> dict[int | None, torch.Tensor | None]:
        """The mask to add to the scores, [group_size, 1, max_tokens, max_context], by distinct window.

        With ALiBi or a relative bias it has all heads: [group_size, num_heads, max_tokens, max_context], or for single
        tokens [group_size, num_kv_heads, heads of a group, max_context]. None if a single token sees everything, or if
        a first chunk only needs the causal triangle. num_later: int32 [group_size, max_tokens], see `StepMetadata`.
        """
        if num_later is not None and not num_later.any():
            num_later = None
        assert num_later is None or (group.query_positions + num_later < group.max_context).all(), "spans are whole"
        is_unpadded = bool((group.query_positions == group.max_context - 1).all())
        masks: dict[int | None, torch.Tensor | None] = {}
        for window in windows:
            has_window = window is not None and window < group.max_context
            has_bias = len(self._slopes) > 0 or self._relative_bias is not None
            if not has_window and (group.is_causal or is_unpadded) and not has_bias and num_later is None:
                masks[window] = None
                continue
            queries = self._to_device(group.query_positions).int()[:, None, :, None]
            distance = queries - torch.arange(group.max_context, dtype=torch.int32, device=self._device)
            is_hidden = distance < 0
            if num_later is not None:
                is_hidden = distance < -self._to_device(num_later).int()[:, None, :, None]
            if has_window:
                is_far = distance >= window
                is_far[..., : self._num_sink_tokens] = False
                is_hidden |= is_far
            if has_bias:
                mask = self._bias(distance).masked_fill_(is_hidden, float("-inf")).to(self._dtype)
                if mask.shape[2] == 1:
                    mask = mask.view(len(mask), self._config.num_kv_heads, -1, group.max_context)
                masks[window] = mask
                continue
            mask = torch.zeros(is_hidden.shape, dtype=self._dtype, device=self._device)
            masks[window] = mask.masked_fill_(is_hidden, float("-inf"))
        return masks

    def _bias(self, distance: torch.Tensor) -> torch.Tensor:
        """What is added to scores, [n, num_heads, ...], by distance [n, 1, ...] to keys, which is negative behind."""
        if self._relative_bias is None:
            return self._slopes[:, None, None] * -distance
        return self._relative_bias[:, distance[:, 0].clamp(min=0)].transpose(0, 1)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        """The array as an int64 index tensor on the device."""
        return torch.from_numpy(array).to(self._device, torch.int64)

    def _workspace(self, name: str, num_rows: int, num_columns: int) -> torch.Tensor:
        """An uninitialised tensor [num_rows, num_columns], reused in every step: new memory is slow at first.

        Layers and groups have the same memory, because they run one after the other.
        """
        size, buffer = num_rows * num_columns, self._workspaces.get(name)
        if buffer is None or len(buffer) < size:
            buffer = torch.empty(size * 3 // 2, dtype=self._dtype, device=self._device)
            self._workspaces[name] = buffer
        return buffer[:size].view(num_rows, num_columns)


class LayerCache(Protocol):
    """The keys and values of one layer. A block holds `block_size` tokens, a token its k heads and then its v heads."""

    def append(self, slots: torch.Tensor, key_value: torch.Tensor) -> None:
        """Stores rotated keys and any values, [num_rows, size] in the model's dtype, in slots int64 [num_rows]."""

    def gather(self, blocks: torch.Tensor, out: torch.Tensor) -> None:
        """Writes whole blocks, int64 [num_blocks], to `out`, [num_blocks, elements of a block] of any dtype."""


def make_layer_cache(blocks: torch.Tensor, scales: torch.Tensor | None) -> LayerCache:
    """The cache of a layer of `BlockStorage`, with token-major blocks. Raises ConfigError for an unknown dtype."""
    if blocks.dtype in _PLAIN_DTYPES:
        return _PlainLayerCache(blocks)
    if scales is None:
        supported = ", ".join(map(str, (*_PLAIN_DTYPES, torch.float8_e4m3fn, torch.int8)))
        raise ConfigError(f"the torch backend stores {supported}, this KV cache is {blocks.dtype}")
    return _Int8LayerCache(blocks, scales) if blocks.dtype == torch.int8 else _Fp8LayerCache(blocks, scales)


class _PlainLayerCache:
    """Stores numbers as they are, or converts them to the cache's dtype."""

    def __init__(self, blocks: torch.Tensor) -> None:
        self._blocks = blocks.flatten(1)
        self._slots = blocks.flatten(0, 1).flatten(1)

    def append(self, slots: torch.Tensor, key_value: torch.Tensor) -> None:
        if key_value.dtype != self._slots.dtype:
            key_value = key_value.to(self._slots.dtype).nan_to_num_()  # beyond its range: its largest
        self._slots.index_copy_(0, slots, key_value)

    def gather(self, blocks: torch.Tensor, out: torch.Tensor) -> None:
        if out.dtype == self._blocks.dtype:
            torch.index_select(self._blocks, 0, blocks, out=out)
        else:
            out.copy_(self._blocks.index_select(0, blocks))


class _Fp8LayerCache:
    """Stores number / scale as e4m3, rounded to the nearest; what is beyond 448 becomes 448. See `BlockStorage`."""

    def __init__(self, blocks: torch.Tensor, scales: torch.Tensor) -> None:
        codes = blocks.view(torch.uint8)  # torch indexes no float8
        self._blocks, self._slots = codes.flatten(1), codes.flatten(0, 1).flatten(1)
        self._scales = scales[:, None]  # float32 [2, 1], of keys and values
        self._block_size = blocks.shape[1]

    def append(self, slots: torch.Tensor, key_value: torch.Tensor) -> None:
        scaled = key_value.float().unflatten(1, (2, -1)) / self._scales
        codes = scaled.nan_to_num(0.0).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        self._slots.index_copy_(0, slots, codes.view(torch.uint8).flatten(1))

    def gather(self, blocks: torch.Tensor, out: torch.Tensor) -> None:
        codes = self._blocks.index_select(0, blocks).view(torch.float8_e4m3fn)
        shape = (len(blocks), self._block_size, 2, -1)
        torch.mul(codes.float().view(shape), self._scales, out=out.view(shape))


class _Int8LayerCache:
    """Stores each head of a token as round(number / scale), where scale is the head's largest magnitude / 127."""

    def __init__(self, blocks: torch.Tensor, scales: torch.Tensor) -> None:
        self._block_shape = blocks.shape[1:]  # block_size, 2 * num_kv_heads, head_dim
        self._blocks, self._slots = blocks, blocks.flatten(0, 1)
        self._block_scales, self._slot_scales = scales, scales.flatten(0, 1)

    def append(self, slots: torch.Tensor, key_value: torch.Tensor) -> None:
        heads = key_value.nan_to_num(0.0).float().unflatten(1, self._block_shape[1:])
        scales = heads.abs().amax(dim=-1) / INT8_MAX
        codes = (heads / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).round()
        self._slots.index_copy_(0, slots, codes.to(torch.int8))
        self._slot_scales.index_copy_(0, slots, scales)

    def gather(self, blocks: torch.Tensor, out: torch.Tensor) -> None:
        codes, scales = self._blocks.index_select(0, blocks), self._block_scales.index_select(0, blocks)
        torch.mul(codes, scales[..., None], out=out.view(codes.shape))
