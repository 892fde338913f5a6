"""Backends for decoders whose layers attend by turns over their tokens and over an encoder's output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from services.attn_worker.cache.source_group import StepSources
from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.layers import AttentionBackend, BackendSetup
from services.attn_worker.layers.attention_among_others import AttentionAmongOthers, attention_part
from services.attn_worker.layers.cross.source_storage import SourceStorage
from services.attn_worker.layers.mha.torch_attention import TorchAttention
from services.attn_worker.runner.step_metadata import StepMetadata
from services.channel import Channel, Flag, qkv_flag, rows_of_layer
from services.common.encoders.source_pieces import SourcePiece, source_pieces


class CrossBackend(Protocol):
    """The layers with cross attention of a model on one device; it owns what they read."""

    storage: SourceStorage

    def begin_step(self, step: StepMetadata) -> None:
        """Prepares the data that all layers of a step share."""
        ...

    def forward(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """Runs one layer; see `AttentionBackend.forward`. A row of qkv has q heads alone."""
        ...


class CrossedAttention(AttentionAmongOthers):
    """An AttentionBackend whose other layers have cross attention. Of their rows of qkv they read the q heads alone."""

    def __init__(self, attention: AttentionBackend, cross: CrossBackend, spec: KVCacheSpec) -> None:
        super().__init__(attention, cross, spec.num_layers, spec.cross_layers)
        self._cross = cross
        self._sizes = {layer: heads.source_size for layer, heads in spec.cross_layers.items()}
        self.cross_layers = tuple(self._sizes)  # in the order in which they are written

    def use_sinks(self, sinks: Sequence[Sequence[float]]) -> None:
        """No such model has learned sinks."""
        raise AssertionError("a model with an encoder has no sinks")

    def use_relative_bias(self, bias: Sequence[Sequence[float]]) -> None:
        """Sets the bias of the layers with keys of tokens."""
        self._attention.use_relative_bias(bias)

    def begin_step(self, step: StepMetadata) -> None:
        """Begins the step in both."""
        self._attention.begin_step(step)
        self._cross.begin_step(step)

    def store_sources(self, step: StepMetadata, channel: Channel) -> None:
        """Stores what the step writes of encoders' outputs, before its layers: for each part of their rows, by layer.

        Raises the errors of `Channel.wait`.
        """
        writes = step.of(StepSources).writes
        slots = [slot for slot, _ in writes]
        for pieces in source_pieces([length for _, length in writes], len(channel.qkv)):
            num_rows = sum(piece.num_rows for piece in pieces)
            for layer in self.cross_layers:
                channel.wait(qkv_flag(num_rows))
                self.store_source(layer, channel.qkv[:num_rows], pieces, slots)
                channel.signal(Flag.ATTENTION_READY)

    def store_source(
        self, layer: int, rows: torch.Tensor, pieces: Sequence[SourcePiece], slots: Sequence[int]
    ) -> None:
        """rows: of the seam, [n, widest layer], of which those of the layer are the pieces' keys and values.

        slots: by index of a piece
        """
        self._cross.storage.write(layer, rows_of_layer(rows, self._sizes[layer]), pieces, slots)


class TorchCrossAttention:
    """A CrossBackend for any torch device: the default on a CPU, and the reference for the kernels.

    Rows that read the same slot, such as beams, are computed together.
    """

    def __init__(self, spec: KVCacheSpec, scale: float | None, device: torch.device) -> None:
        """`scale`: of the scores; None: 1 / sqrt(head_dim). Raises CapacityError if memory is too small."""
        self.storage = SourceStorage(spec, device)
        self._heads = spec.cross_layers
        self._scale = scale
        self._device = device
        self._groups: list[tuple[int, int, slice | torch.Tensor]] = []  # slot, length, rows of the step

    def begin_step(self, step: StepMetadata) -> None:
        """Groups the step's rows by slot."""
        sources = step.of(StepSources)
        slots = np.repeat(sources.slots, step.num_tokens)
        lengths = dict(zip(sources.slots.tolist(), sources.lengths.tolist(), strict=True))
        order = np.argsort(slots, kind="stable")
        starts = np.flatnonzero(np.diff(slots[order], prepend=-1)) if len(slots) else np.zeros(0, np.int64)
        self._groups = []
        for rows in np.split(order, starts[1:]) if len(slots) else []:
            slot, first, last = int(slots[rows[0]]), int(rows[0]), int(rows[-1])
            is_slice = last - first + 1 == len(rows)
            place = slice(first, last + 1) if is_slice else torch.from_numpy(rows).to(self._device)
            self._groups.append((slot, lengths[slot], place))

    def forward(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """qkv: rows of q heads alone, [num_tokens, q_size]; out: [num_tokens, attn_size], written in place."""
        heads, storage = self._heads[layer], self.storage.layers[layer]
        query = rows_of_layer(qkv, heads.q_size).view(-1, heads.num_heads, heads.head_dim)
        out = rows_of_layer(out, heads.attn_size).view(query.shape)
        for slot, length, rows in self._groups:
            keys, values = storage[slot, :length].unbind(1)
            attended = scaled_dot_product_attention(
                query[rows].transpose(0, 1).to(keys.dtype),
                keys.transpose(0, 1),
                values.transpose(0, 1),
                scale=self._scale,
                enable_gqa=heads.num_heads > heads.num_kv_heads,
            )
            out[rows] = attended.transpose(0, 1).to(out.dtype)


def crossed_torch_attention(setup: BackendSetup) -> CrossedAttention:
    """Both kinds of layers in torch operations. Raises CapacityError if memory is too small."""
    cross = TorchCrossAttention(setup.spec, setup.config.attention.scale, setup.device)
    return CrossedAttention(TorchAttention(attention_part(setup)), cross, setup.spec)
