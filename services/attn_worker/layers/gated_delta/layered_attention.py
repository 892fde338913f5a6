"""Backends for models in which some layers have attention and the others a gated delta recurrence.

They choose by layer. The backend of the attention layers sees a model without the other ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from services.attn_worker.cache.block_storage import BlockStorage
from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.cache.step_states import StepStates
from services.attn_worker.layers import AttentionBackend
from services.attn_worker.layers.gated_delta.no_attention import NoAttention
from services.attn_worker.layers.gated_delta.torch_recurrences import TorchRecurrences
from services.attn_worker.layers.mha.torch_attention import TorchAttention
from services.attn_worker.runner.step_metadata import StepMetadata
from services.common.attention.recurrence_weights import RecurrenceWeights
from services.common.kv_cache.scales import KVScales
from services.common.model_config import ModelConfig


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


class LayeredAttention:
    """An AttentionBackend of two others."""

    def __init__(self, attention: AttentionBackend, gated_delta: GatedDeltaBackend, spec: KVCacheSpec) -> None:
        """`attention` is made for the `attention_layers` of the config, and those of `spec`."""
        self._attention = attention
        self._gated_delta = gated_delta
        of_attention = [layer for layer in range(spec.num_layers) if layer not in spec.recurrences]
        self._places = {layer: place for place, layer in enumerate(of_attention)}  # in `attention`

    @property
    def storage(self) -> BlockStorage:
        """That of the layers with attention."""
        return self._attention.storage

    def copy_blocks(self, copies: Sequence[tuple[int, int]], group: int = 0) -> None:
        """Copies blocks of the layers with attention. Sequences share states, which are never overwritten."""
        self._attention.copy_blocks(copies, group)

    def use_scales(self, scales: KVScales) -> None:
        """Sets the scales of FP8 layers with attention."""
        keys, values = (tuple(each[layer] for layer in self._places) for each in (scales.keys, scales.values))
        self._attention.use_scales(KVScales(keys, values))

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

    def forward(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """Runs the layer in the one that has it."""
        if layer in self._places:
            self._attention.forward(self._places[layer], qkv, out)
        else:
            self._gated_delta.forward(layer, qkv, out)


def layered_torch_attention(
    config: ModelConfig, spec: KVCacheSpec, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> LayeredAttention:
    """Both kinds of layers in torch operations. Raises CapacityError if memory is too small."""
    of_attention = spec.attention_layers()
    attention: AttentionBackend = NoAttention(of_attention, device)
    if of_attention.num_layers:
        attention = TorchAttention(attention_layers(config), of_attention, dtype, device, max_model_len)
    return LayeredAttention(attention, TorchRecurrences(spec, device), spec)


def attention_layers(config: ModelConfig) -> ModelConfig:
    """The config without layers that keep nothing of each token, as the backend of the others needs it."""
    others = {*config.recurrent_layers, *config.cross_layers}
    layers = [layer for layer in range(config.num_layers) if layer not in others]
    heads = tuple(config.layer_heads[layer] for layer in layers)
    assert all(each.kv_layer is None for each in heads), "no such model has layers that read the keys of others"
    options = config.attention
    return replace(
        config,
        num_layers=len(layers),
        sliding_windows=tuple(config.sliding_windows[layer] for layer in layers),
        attention=replace(
            options,
            layer_heads=() if set(heads) == {config.heads} else heads,
            layer_ropes=tuple(options.layer_ropes[layer] for layer in layers) if options.layer_ropes else (),
        ),
    )
