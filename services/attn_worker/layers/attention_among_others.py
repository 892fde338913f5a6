"""`AttentionAmongOthers`: backends for models in which only some layers keep keys and values of each token.

They choose by layer. The backend of the layers with keys of tokens sees a model without the other ones.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Protocol

import torch

from services.attn_worker.cache.block_storage import BlockStorage
from services.attn_worker.layers import AttentionBackend, BackendSetup
from services.common.kv_cache.scales import KVScales
from services.common.model_config import ModelConfig


class OtherLayers(Protocol):
    """The other layers of a model on one device; it owns what they keep."""

    def forward(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """Runs one layer; see `AttentionBackend.forward`."""
        ...


class AttentionAmongOthers:
    """Most of an AttentionBackend. A subclass begins steps, and has what is special about its other layers."""

    def __init__(
        self, attention: AttentionBackend, others: OtherLayers, num_layers: int, other_layers: Collection[int]
    ) -> None:
        """`attention` is made for the `attention_part`."""
        self._attention = attention
        self._others = others
        of_attention = [layer for layer in range(num_layers) if layer not in other_layers]
        self._places = {layer: place for place, layer in enumerate(of_attention)}  # in `attention`

    @property
    def storage(self) -> BlockStorage:
        """That of the layers with keys of tokens. What others keep is shared by sequences, and never overwritten."""
        return self._attention.storage

    def use_scales(self, scales: KVScales) -> None:
        """Sets the scales of those of these layers that store FP8."""
        keys, values = (tuple(each[layer] for layer in self._places) for each in (scales.keys, scales.values))
        self._attention.use_scales(KVScales(keys, values))

    def forward(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """Runs the layer in the backend that has it."""
        if layer in self._places:
            self._attention.forward(self._places[layer], qkv, out)
        else:
            self._others.forward(layer, qkv, out)


def attention_part(setup: BackendSetup) -> BackendSetup:
    """For the backend of the layers that keep something of each token. There must be one."""
    return replace(setup, config=_attention_layers(setup.config), spec=setup.spec.attention_layers())


def _attention_layers(config: ModelConfig) -> ModelConfig:
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
