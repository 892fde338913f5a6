"""`KVCacheSpec`: the contents and size of the paged KV cache, which the backends allocate by layer and block.

All layers have the same blocks, or some have a window and blocks of their own: a second group (`WindowGroup`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from services.attn_worker.cache.build_cache import SourceSlots, WindowBlocks
from services.common.families.shape import Recurrence
from services.common.model_config import LayerHeads, ModelConfig

SCALE_DTYPE = STATE_DTYPE = torch.float32


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Sizes, element types and windows of a model's keys and values.

    A backend supports every field, or refuses it by a ConfigError that names the value. An element type without
    floating-point arithmetic of its own comes with scales: float8_e4m3fn with one for a layer's keys and one for its
    values (`KVScales`), int8 with one for each token and head, which lies in the block beside the elements.
    """

    # For sequences; one more block with this index, the null block, serves rows without a sequence.
    num_blocks: int
    block_size: int  # tokens
    num_kv_heads: int  # of every layer, if `layer_heads` does not say otherwise
    head_dim: int
    dtype: torch.dtype  # of stored elements, except in `exceptions`; the model may compute in another dtype
    windows: tuple[int | None, ...]  # per layer; token i sees token j iff 0 <= i - j < window; None: iff 0 <= i - j
    exceptions: Mapping[int, torch.dtype] = field(default_factory=dict)  # layers with another dtype, from 0
    layer_heads: tuple[LayerHeads, ...] = ()  # per layer, if they differ, or if some read the keys of others
    has_values: bool = True  # False: a token's values are a part of its keys, and nothing else is stored
    window_blocks: WindowBlocks | None = None  # of the `window_layers`; `num_blocks` are then those of the others
    # For sequences, in gated delta layers, which have no blocks; two more slots serve the backend (see `StepStates`).
    num_state_slots: int = 0
    source_slots: SourceSlots | None = None  # of the layers with cross attention, which have no blocks; None: none have

    @classmethod
    def of_model(cls, config: ModelConfig, dtype: torch.dtype, num_blocks: int, block_size: int) -> KVCacheSpec:
        """The spec with the heads and windows of a model."""
        return cls(
            num_blocks,
            block_size,
            config.num_kv_heads,
            config.head_dim,
            dtype,
            config.sliding_windows,
            layer_heads=config.attention.layer_heads,
            has_values=config.attention.value_dim is None,
        )

    def dtype_of(self, layer: int) -> torch.dtype:
        """The dtype of the stored elements of a layer."""
        return self.exceptions.get(self.kv_layer(layer), self.dtype)

    def kv_layer(self, layer: int) -> int:
        """The layer whose part of the blocks a layer reads: itself, or an earlier one."""
        if not self.layer_heads or self.layer_heads[layer].kv_layer is None:
            return layer
        return self.layer_heads[layer].kv_layer

    def kv_shape(self, layer: int) -> tuple[int, int]:
        """The number of k heads, as many as any v heads, that a layer reads, and their size."""
        if not self.layer_heads:
            return self.num_kv_heads, self.head_dim
        return self.layer_heads[layer].num_kv_heads, self.layer_heads[layer].head_dim

    @property
    def recurrences(self) -> dict[int, Recurrence]:
        """The layers that have states in place of keys and values."""
        layers = enumerate(self.layer_heads)
        return {layer: heads.recurrence for layer, heads in layers if heads.recurrence is not None}

    @property
    def state_bytes(self) -> int:
        """Bytes of one slot in all gated delta layers: matrices and past rows, all in float32."""
        return STATE_DTYPE.itemsize * sum(
            math.prod(sizes.state_shape) + (sizes.conv_size - 1) * sizes.conv_dim
            for sizes in self.recurrences.values()
        )

    @property
    def cross_layers(self) -> dict[int, LayerHeads]:
        """The layers with cross attention, in order."""
        return {layer: heads for layer, heads in enumerate(self.layer_heads) if heads.is_cross}

    @property
    def source_bytes(self) -> int:
        """Bytes of one slot of an encoder's output in all layers with cross attention, in the cache's dtype."""
        length = 0 if self.source_slots is None else self.source_slots.max_source_len
        return length * self.dtype.itemsize * sum(heads.source_size for heads in self.cross_layers.values())

    @property
    def token_layers(self) -> list[int]:
        """The layers that read something of each token."""
        others = {**self.recurrences, **self.cross_layers}
        return [layer for layer in range(self.num_layers) if layer not in others]

    def attention_layers(self) -> KVCacheSpec:
        """The spec of the `token_layers` alone, for their backend."""
        layers = self.token_layers
        heads = tuple(self.layer_heads[layer] for layer in layers)
        return replace(self, windows=tuple(self.windows[layer] for layer in layers), layer_heads=heads)

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The dtype of each layer."""
        return [self.dtype_of(layer) for layer in range(self.num_layers)]

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def window(self) -> int | None:
        """The longest window if all layers have one; None: some layer reads all keys."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if len(windows) == self.num_layers else None

    @property
    def window_layers(self) -> frozenset[int]:
        """The layers with a window whose keys no layer without a window reads; none if all layers are alike in this."""
        if self.recurrences or self.cross_layers:
            return frozenset()  # such models have no windows
        readers: dict[int, list[int | None]] = {layer: [] for layer in self.storing_layers}
        for layer, window in enumerate(self.windows):
            readers[self.kv_layer(layer)].append(window)
        limited = {layer for layer, windows in readers.items() if None not in windows}
        if len(limited) == len(readers):
            return frozenset()
        return frozenset(layer for layer in range(self.num_layers) if self.kv_layer(layer) in limited)

    def group_of(self, layer: int) -> int:
        """1: the layer's keys and values are in the blocks of the `window_blocks`; 0: in all others."""
        return int(self.window_blocks is not None and layer in self.window_layers)

    @property
    def num_groups(self) -> int:
        """Of layers."""
        return 1 if self.window_blocks is None else 2

    def num_blocks_of(self, group: int) -> int:
        """Number of blocks of a group; this is also the index of its null block."""
        return self.num_blocks if self.window_blocks is None or group == 0 else self.window_blocks.num_blocks

    @property
    def storing_layers(self) -> list[int]:
        """The layers that store keys and values of their own."""
        return [layer for layer in self.token_layers if self.kv_layer(layer) == layer]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys, values and scales in all layers."""
        return sum(map(self._layer_bytes, self.storing_layers))

    def group_token_bytes(self, group: int) -> int:
        """The same in the layers of one group."""
        return sum(self._layer_bytes(layer) for layer in self.storing_layers if self.group_of(layer) == group)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.block_size * self.token_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks and states, without the null blocks and the backend's two slots."""
        groups = range(self.num_groups)
        blocks = self.block_size * sum(self.num_blocks_of(each) * self.group_token_bytes(each) for each in groups)
        num_sources = 0 if self.source_slots is None else self.source_slots.num_slots
        return blocks + self.num_state_slots * self.state_bytes + num_sources * self.source_bytes

    def token_major_block(self, layer: int) -> tuple[int, ...]:
        """The shape of a layer's part of a block in which each token has its k heads and then its v heads, if any."""
        num_kv_heads, head_dim = self.kv_shape(layer)
        return (self.block_size, (1 + self.has_values) * num_kv_heads, head_dim)

    def head_major_block(self, layer: int) -> tuple[int, ...]:
        """The shape of a layer's part of a block in which each head has the keys and then any values of all tokens."""
        num_kv_heads, head_dim = self.kv_shape(layer)
        return (num_kv_heads, 1 + self.has_values, self.block_size, head_dim)

    def _layer_bytes(self, layer: int) -> int:
        dtype, (num_kv_heads, head_dim) = self.dtype_of(layer), self.kv_shape(layer)
        scale_bytes = SCALE_DTYPE.itemsize if dtype == torch.int8 else 0
        return (1 + self.has_values) * num_kv_heads * (head_dim * dtype.itemsize + scale_bytes)
