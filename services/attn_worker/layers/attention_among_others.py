"""`AttentionAmongOthers`: a backend for models in which only some layers keep keys and values of each token.

It chooses by layer. The backend of the layers with keys of tokens sees a model without the other ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn, Protocol

import torch

from services.attn_worker.cache.block_storage import BlockStorage
from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.cache.step_metadata import StepMetadata
from services.attn_worker.layers import (
    DECODE_ONLY,
    AttentionBackend,
    BackendSetup,
    CapturableAttention,
    StepShape,
)
from services.channel import Channel
from services.common.attention.learned import Learned
from services.common.model_config import ModelConfig


class OtherLayers(Protocol):
    """The other layers of a model on one device; it owns what they keep."""

    def use_learned(self, learned: Learned) -> None:
        """Sets what these layers have of it, by the model's numbers of layers, for later steps."""
        ...

    def take_extra_rows(self, step: StepMetadata, channel: Channel) -> None:
        """Stores what comes before the step's layers. Raises the errors of `Channel.wait`."""
        ...

    def begin_step(self, step: StepMetadata) -> None:
        """Prepares the data that all layers of a step share."""
        ...

    def forward(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """Runs one layer; see `AttentionBackend.forward`."""
        ...


class CapturableLayers(OtherLayers, Protocol):
    """Such layers on CUDA, whose steps can be captured."""

    captures_chunks: bool  # also steps in which a sequence has several tokens
    layers_to_compile: Sequence[int]  # see `CapturableAttention`

    def begin_step(self, step: StepMetadata, padded_num_rows: int | None = None) -> None:
        """Prepares a step, with padding to so many rows; None: without."""
        ...


class AttentionAmongOthers:
    """An AttentionBackend."""

    def __init__(self, attention: AttentionBackend, others: OtherLayers, spec: KVCacheSpec) -> None:
        """`attention` is made for the `attention_part`; `spec` is of all layers."""
        self.others = others
        self._attention = attention
        self._places = {layer: place for place, layer in enumerate(spec.token_layers)}  # in `attention`

    @property
    def storage(self) -> BlockStorage:
        """That of the layers with keys of tokens. What others keep is shared by sequences, and never overwritten."""
        return self._attention.storage

    def use_learned(self, learned: Learned) -> None:
        """Gives each part what its layers have."""
        self._attention.use_learned(learned.of_layers(list(self._places)))
        self.others.use_learned(learned)

    def begin_step(self, step: StepMetadata) -> None:
        """Begins the step in both."""
        self._attention.begin_step(step)
        self.others.begin_step(step)

    def forward(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """Runs the layer in the backend that has it."""
        if layer in self._places:
            self._attention.forward(self._places[layer], qkv, out)
        else:
            self.others.forward(layer, qkv, out)


class CapturableAttentionAmongOthers(AttentionAmongOthers):
    """A CapturableAttention: steps that both parts can capture are captured."""

    def __init__(self, attention: CapturableAttention, others: CapturableLayers, spec: KVCacheSpec) -> None:
        super().__init__(attention, others, spec)
        self._capturable, self._capturable_others = attention, others
        layers, shapes = list(self._places), attention.captured_shapes
        self.captured_shapes = [each for each in shapes if others.captures_chunks or each == DECODE_ONLY]
        self.layers_to_compile = [*(layers[place] for place in attention.layers_to_compile), *others.layers_to_compile]

    def captured_shape(self, step: StepMetadata) -> StepShape | None:
        """That of the layers with keys of tokens, if the others have it, too."""
        shape = self._capturable.captured_shape(step)
        return shape if shape in self.captured_shapes else None

    def begin_step(
        self, step: StepMetadata, padded_num_rows: int | None = None, shape: StepShape = DECODE_ONLY
    ) -> None:
        """Begins the step in both."""
        self._capturable.begin_step(step, padded_num_rows, shape)
        self._capturable_others.begin_step(step, padded_num_rows)


class NoAttention:
    """A CapturableAttention without layers, for models such as Mamba 2: blocks only count the tokens of sequences."""

    captured_shapes: Sequence[StepShape] = (DECODE_ONLY,)
    layers_to_compile: Sequence[int] = ()

    def __init__(self, setup: BackendSetup) -> None:
        self.storage = BlockStorage(setup.spec, setup.spec.token_major_block, setup.device)

    def use_learned(self, learned: Learned) -> None:
        """There is nothing that could use it."""

    def captured_shape(self, step: StepMetadata) -> StepShape | None:
        """Whatever the other layers can capture."""
        return DECODE_ONLY if len(step.positions) == len(step.num_tokens) else None

    def begin_step(
        self, step: StepMetadata, padded_num_rows: int | None = None, shape: StepShape = DECODE_ONLY
    ) -> None:
        """There is nothing to prepare."""

    def forward(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> NoReturn:
        """Is never called."""
        raise AssertionError("the model has no layer with attention")


def attention_part(setup: BackendSetup) -> BackendSetup:
    """For the backend of the layers that keep something of each token."""
    return replace(setup, config=_attention_layers(setup), spec=setup.spec.attention_layers())


def _attention_layers(setup: BackendSetup) -> ModelConfig:
    config, layers = setup.config, setup.spec.token_layers
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
