"""`LayerKernels`: the Triton kernels that `TritonAttention` launches in every layer, for one kind of attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.attn_worker.backends.triton_decode import DecodeTiles, choose_decode_tiles, decode_attention
from services.attn_worker.backends.triton_prefill import PrefillTiles, choose_prefill_tiles, prefill_attention
from services.attn_worker.backends.triton_rope_append import append_prefill
from services.attn_worker.layers.latent.triton_decode import choose_latent_decode_tiles, decode_latent
from services.attn_worker.layers.latent.triton_prefill import (
    append_latent,
    choose_latent_prefill_tiles,
    prefill_latent,
)


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """Functions with the same parameters for every kind of attention."""

    choose_decode_tiles: Callable[..., DecodeTiles]
    choose_prefill_tiles: Callable[..., PrefillTiles]
    decode: Callable[..., None]  # rows of sequences with one token: appends and attends
    append: Callable[..., None]  # the other rows
    attend: Callable[..., None]  # for the other rows, whose keys have been appended


PLAIN_KERNELS = LayerKernels(
    choose_decode_tiles, choose_prefill_tiles, decode_attention, append_prefill, prefill_attention
)
LATENT_KERNELS = LayerKernels(
    choose_latent_decode_tiles, choose_latent_prefill_tiles, decode_latent, append_latent, prefill_latent
)
