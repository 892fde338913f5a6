"""Backends for decoders whose layers attend by turns over their tokens and over an encoder's output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from services.attn_worker.cache.source_group import StepSources
from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.layers import AttentionBackend, BackendSetup
from services.attn_worker.layers.attention_among_others import AttentionAmongOthers, attention_part
from services.attn_worker.layers.cross.source_storage import SourceStorage
from services.attn_worker.layers.cross.torch_cross_attention import TorchCrossAttention
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


def crossed_torch_attention(setup: BackendSetup) -> CrossedAttention:
    """Both kinds of layers in torch operations. Raises CapacityError if memory is too small."""
    cross = TorchCrossAttention(setup.spec, setup.config.attention.scale, setup.device)
    return CrossedAttention(TorchAttention(attention_part(setup)), cross, setup.spec)
