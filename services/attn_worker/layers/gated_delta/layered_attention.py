"""Backends for models in which some layers have attention and the others a gated delta recurrence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn, Protocol

import torch

from services.attn_worker.cache.block_storage import BlockStorage
from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.cache.step_states import StepStates
from services.attn_worker.layers import AttentionBackend, BackendSetup
from services.attn_worker.layers.attention_among_others import AttentionAmongOthers, attention_part
from services.attn_worker.layers.gated_delta.torch_recurrences import TorchRecurrences
from services.attn_worker.layers.mha.torch_attention import TorchAttention
from services.attn_worker.runner.step_metadata import StepMetadata
from services.common.attention.learned import RecurrenceWeights
from services.common.kv_cache.scales import KVScales


class GatedDeltaBackend(Protocol):
    """The gated delta layers of a model on one device; it owns their states."""

    def use_weights(self, weights: Mapping[int, RecurrenceWeights]) -> None:
        """Sets the weights of all layers, for later steps."""
        ...

    def begin_step(self, states: StepStates) -> None:
        """Prepares the data that all layers of a step share."""
        ...

    def forward(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """Runs one layer; see `AttentionBackend.forward`. A row of qkv is q, k, v, b and a."""
        ...


class LayeredAttention(AttentionAmongOthers):
    """An AttentionBackend whose other layers have a recurrence."""

    def __init__(self, attention: AttentionBackend, gated_delta: GatedDeltaBackend, spec: KVCacheSpec) -> None:
        super().__init__(attention, gated_delta, spec.num_layers, spec.recurrences)
        self._gated_delta = gated_delta

    def use_sinks(self, sinks: Sequence[Sequence[float]]) -> None:
        """Sets the learned sinks of the layers with attention."""
        self._attention.use_sinks([sinks[layer] for layer in self._places])

    def use_recurrences(self, weights: Mapping[int, RecurrenceWeights]) -> None:
        """Sets the weights of the other layers."""
        self._gated_delta.use_weights(weights)

    def begin_step(self, step: StepMetadata) -> None:
        """Begins the step in both."""
        self._attention.begin_step(step)
        self._gated_delta.begin_step(step.of(StepStates))


class NoAttention:
    """An AttentionBackend without layers, for models such as Mamba 2: blocks only count the tokens of sequences."""

    layers_to_compile: Sequence[int] = ()

    def __init__(self, spec: KVCacheSpec, device: torch.device) -> None:
        """spec: without layers"""
        self.storage = BlockStorage(spec, spec.token_major_block, device)

    def use_scales(self, scales: KVScales) -> None:
        """There is nothing to scale."""

    def begin_step(self, step: StepMetadata, padded_num_rows: int | None = None) -> None:
        """There is nothing to prepare."""

    def forward(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> NoReturn:
        """Is never called."""
        raise AssertionError("the model has no layer with attention")


def layered_torch_attention(setup: BackendSetup) -> LayeredAttention:
    """Both kinds of layers in torch operations. Raises CapacityError if memory is too small."""
    spec, device = setup.spec, setup.device
    attention: AttentionBackend = NoAttention(spec.attention_layers(), device)
    if spec.attention_layers().num_layers:
        attention = TorchAttention(attention_part(setup))
    return LayeredAttention(attention, TorchRecurrences(spec, device), spec)
