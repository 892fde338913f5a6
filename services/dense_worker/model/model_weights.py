"""`ModelWeights`: a model built from its parts, which hold its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from services.dense_worker.encoders.source.source_encoder import SourceEncoder
from services.dense_worker.model.head import Embedding, Head, LearnedPositions
from services.dense_worker.model.layer import DecoderLayer
from services.dense_worker.parameters import Parameter, parameters, parts_of_type


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of a model, contiguous, on one device; never written after loading."""

    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    head: Head
    encoder: SourceEncoder | None = None  # None: no layer has cross attention

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype: that of activations and unquantized weights."""
        return self.embedding.table.data.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.table.data.device

    @property
    def reads_positions(self) -> bool:
        """Whether the embedding adds learned positions, so that a step needs the positions of its tokens."""
        return any(parts_of_type(LearnedPositions, self.embedding))

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """All parameters, such as ("layers.0.qkv_weight", ...). A tied lm_head has the embedding's tensor."""
        for parameter in parameters(self.embedding):
            yield parameter.name, parameter
        for i, layer in enumerate(self.layers):
            for parameter in parameters(layer):
                yield f"layers.{i}.{parameter.name}", parameter
        for parameter in parameters(self.head):
            yield parameter.name, parameter
        if self.encoder is not None:
            yield from self.encoder.named_parameters()

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors once: a tied lm_head is left out, and so is the second use of a norm."""
        seen: set[int] = set()
        for name, parameter in self.named_parameters():
            if id(parameter.data) not in seen:
                seen.add(id(parameter.data))
                yield name, parameter.data
