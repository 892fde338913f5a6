"""The dense stroke between two attention calls, defined once for torch, CUDA graphs, ONNX and TensorRT.

A model of L layers is one `First`, L - 1 `Middle` (equal shapes, different weights) and one `Last`. Each consists of
one or two halves of layers and runs with the caller's `Operations`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch

from services.channel import rows_of_layer
from services.common.model_config import ModelConfig
from services.dense_worker.backends import GivenEmbeds, InputEmbeds
from services.dense_worker.model.head import Embedding, Head
from services.dense_worker.model.layer import AfterAttention, BeforeAttention
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.operations import Operations, Residual
from services.dense_worker.parameters import tensors_by_name

Weights = dict[str, torch.Tensor]  # by name of the parameter


@dataclass(frozen=True, slots=True)
class First:
    """Token ids -> embedding, and the first half of layer 0."""

    embedding: Embedding
    before: BeforeAttention

    def forward(
        self,
        operations: Operations,
        token_ids: torch.Tensor,
        qkv_out: torch.Tensor | None = None,
        input_embeds: GivenEmbeds | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """token_ids int64 [n] -> qkv [n, qkv_size], residual [n, hidden].

        If `qkv_out` is given, qkv is that tensor, written in place. `input_embeds` replace embeddings.
        """
        residual = self.embedding.forward(operations, token_ids, input_embeds)
        qkv, residual = self.before.forward(operations, residual, qkv_out)
        return qkv, operations.settle(residual)


@dataclass(frozen=True, slots=True)
class FirstOfRows:
    """`First` behind the lookup of the embeddings."""

    embedding: Embedding  # without its table
    before: BeforeAttention

    def forward(self, operations: Operations, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """rows [n, embedding_size] of the table -> qkv [n, qkv_size]; and residual [n, hidden], if that is another."""
        residual = self.embedding.of_rows(operations, Residual(rows), None)
        qkv, residual = self.before.forward(operations, residual, None)
        return (qkv,) if self.embedding.is_lookup else (qkv, operations.settle(residual))


@dataclass(frozen=True, slots=True)
class Middle:
    """The second half of one layer and the first half of the next."""

    after: AfterAttention
    before: BeforeAttention

    def forward(
        self,
        operations: Operations,
        attn_out: torch.Tensor,
        residual: torch.Tensor,
        qkv_out: torch.Tensor | None = None,
        added: InputEmbeds | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """attn_out [n, attn_size], residual [n, hidden] -> qkv [n, qkv_size], residual [n, hidden].

        If `qkv_out` is given, qkv is that tensor, written in place. `added`: to the residual between the layers.
        """
        attn_out = rows_of_layer(attn_out, self.after.attn_size)
        stream = self.after.forward(operations, attn_out, Residual(residual))
        if added is not None:
            stream = Residual(operations.settle(stream).index_add_(0, *added[:2]))
        qkv, stream = self.before.forward(operations, stream, qkv_out)
        return qkv, operations.settle(stream)


@dataclass(frozen=True, slots=True)
class Last:
    """The second half of the last layer, final norm and lm_head, for the rows that need logits."""

    after: AfterAttention
    head: Head

    def forward(
        self,
        operations: Operations,
        attn_out: torch.Tensor,
        residual: torch.Tensor,
        rows: torch.Tensor,
        hidden_out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """attn_out [n, attn_size], residual [n, hidden], rows int64 [r] -> logits [r, vocab], see `Head`.

        If `hidden_out` [r, hidden] is given, the rows' hidden states after the final norm are written there.
        """
        return self.head.forward(operations, self._select(operations, attn_out, residual, rows), hidden_out)

    def hidden(
        self,
        operations: Operations,
        attn_out: torch.Tensor,
        residual: torch.Tensor,
        rows: torch.Tensor,
        hidden_out: torch.Tensor,
    ) -> None:
        """Like `forward`, without logits."""
        stream = self._select(operations, attn_out, residual, rows)
        hidden_out.copy_(operations.normalize(stream, self.head.norm)[1])

    def _select(
        self, operations: Operations, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor
    ) -> Residual:
        """The residual of the rows behind the last layer."""
        attn_out = rows_of_layer(attn_out, self.after.attn_size)
        attn_rows, stream = self.head.select(operations, attn_out, residual, rows)
        return self.after.forward(operations, attn_rows, stream)


@dataclass(frozen=True, slots=True)
class Segments:
    """All segments of a model."""

    first: First
    middle: tuple[Middle, ...]  # [layer]: between the attention of `layer` and of `layer + 1`
    last: Last


def segments_of(weights: ModelWeights) -> Segments:
    """Splits a model at the attention calls. No tensor is copied."""
    layers = weights.layers
    return Segments(
        First(weights.embedding, layers[0].before),
        tuple(Middle(layer.after, following.before) for layer, following in itertools.pairwise(layers)),
        Last(layers[-1].after, weights.head),
    )


def segment_names(config: ModelConfig) -> tuple[str, ...]:
    """The names of a model's segments; a single layer needs no `middle`."""
    return ("first", "middle", "last") if config.num_layers > 1 else ("first", "last")


def behind_lookup(first: First) -> FirstOfRows:
    """What is exported of it."""
    return FirstOfRows(replace(first.embedding, table=None), first.before)


def bind_weights(weights: ModelWeights) -> dict[str, list[Weights]]:
    """The weights of each exported segment, by input name: a list of one entry, for `middle` one entry per layer."""
    segments = segments_of(weights)
    return {
        "first": [tensors_by_name(behind_lookup(segments.first))],
        "middle": [tensors_by_name(middle) for middle in segments.middle],
        "last": [tensors_by_name(segments.last)],
    }
