"""How the torch backend stores and reads the keys and values of one layer, by the dtype of the cache.

These are the definitions that the kernels of other backends are compared with. A block holds `block_size` tokens, a
token its k heads and then its v heads.
"""

from __future__ import annotations

from typing import Protocol

import torch

from services.common.errors import ConfigError

FP8_MAX = 448.0  # the largest number of e4m3
INT8_MAX = 127
_PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class LayerCache(Protocol):
    """The keys and values of one layer."""

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
