"""The weights of a stage: its layers, and the ends of the model where it has them.

Elsewhere a stage has an `Entrance` in place of the embedding, or an `Exit` in place of the head: parts without weights.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar

import torch

from services.common.families.shape import ModelConfig
from services.common.rank import Rank
from services.dense_worker.backends import InputEmbeds
from services.dense_worker.model.allocator import WeightAllocator
from services.dense_worker.model.head import Head
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.operations import Operations, Residual
from services.dense_worker.parameters import Parameter
from services.dense_worker.ranks.stage_links import StageLinks


def stage_weights(
    config: ModelConfig, whole: ModelWeights, rank: Rank, allocator: WeightAllocator
) -> ModelWeights:
    """The stage's part of a model that was built on the meta device. `allocator` makes its tensors."""
    layers, placer = rank.layers(len(whole.layers)), _Placer(allocator, whole.embedding.table)
    is_first, is_last = rank.index == 0, rank.index == rank.count - 1
    embedding: Any = whole.embedding
    if not is_first:
        embedding = Entrance(Parameter("embed", whole.embedding.table.data.new_empty(0, config.hidden_size)))
    head: Any = whole.head if is_last else Exit(whole.head.rescales, len(whole.embedding.table.data))
    parts = embedding, whole.layers[layers.start : layers.stop], head
    return ModelWeights(*map(placer.place, parts))


def linked_weights(weights: ModelWeights, links: StageLinks) -> ModelWeights:
    """The same weights, whose ends exchange rows with other stages."""
    embedding: Any = weights.embedding
    head: Any = weights.head
    embedding = replace(embedding, links=links) if isinstance(embedding, Entrance) else embedding
    head = replace(head, links=links) if isinstance(head, Exit) else LinkedHead(head, links)
    return replace(weights, embedding=embedding, head=head)


@dataclass(frozen=True, slots=True)
class Entrance:
    """In place of an `Embedding`: the residual comes from the stage before."""

    table: Parameter  # [0, hidden]: of the model's dtype, on its device
    links: StageLinks | None = None

    def forward(
        self, operations: Operations, token_ids: torch.Tensor, input_embeds: InputEmbeds | None = None
    ) -> Residual:
        """token_ids int64 [n], of any value -> residual [n, hidden]."""
        assert self.links is not None and input_embeds is None, "only the first stage has vectors for tokens"
        operations.begin_rows(len(token_ids))
        hidden = self.table.data.new_empty(len(token_ids), self.table.data.shape[1])
        self.links.receive_residual(hidden)
        return Residual(hidden)


@dataclass(frozen=True, slots=True)
class Exit:
    """In place of a `Head`: the residual of all rows goes to the next stage. The first gets logits from the last."""

    rescales: bool  # as `Head.rescales`
    vocab_size: int
    links: StageLinks | None = None
    passes_rows_on: ClassVar[bool] = True

    def select(
        self, operations: Operations, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, Residual]:
        """All rows: the last stage selects."""
        assert self.links is not None, "`linked_weights` has linked it"
        self.links.num_sampled = len(rows)
        return attn_out, Residual(residual)

    def forward(
        self, operations: Operations, residual: Residual, hidden_out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """residual [n, hidden] -> logits [r, vocab] of the step's sampled rows; of no meaning in a middle stage."""
        assert self.links is not None and hidden_out is None, "the last stage has these, and sends logits alone"
        hidden = operations.settle(residual)
        self.links.send_residual(hidden)
        return self.links.receive_logits(hidden, self.vocab_size, in_float32=self.rescales)


@dataclass(frozen=True, slots=True)
class LinkedHead:
    """The last stage's `Head`: the first stage gets its logits."""

    head: Head
    links: StageLinks
    passes_rows_on: ClassVar[bool] = False

    @property
    def rescales(self) -> bool:
        """As `Head.rescales`."""
        return self.head.rescales

    def select(
        self, operations: Operations, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, Residual]:
        """As `Head.select`."""
        return self.head.select(operations, attn_out, residual, rows)

    def forward(
        self, operations: Operations, residual: Residual, hidden_out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """residual [n, hidden] -> logits [n, vocab]."""
        logits = self.head.forward(operations, residual, hidden_out)
        self.links.send_logits(logits)
        return logits


class _Placer:
    """Gives parts tensors of an allocator. `table`: the embedding's, which a tied head reads, too."""

    def __init__(self, allocator: WeightAllocator, table: Parameter) -> None:
        self._allocator, self._table = allocator, table
        self._made: dict[int, Parameter] = {}  # by the id of the whole model's tensor: some parts share one

    def place(self, part: Any) -> Any:
        """The same part with other tensors."""
        match part:
            case Parameter():
                made = self._made.get(id(part.data)) or self._make(part)
                return Parameter(part.name, made.data, made.sources)
            case torch.Tensor():  # what steps count
                return torch.zeros_like(part, device=self._allocator.device)
            case tuple():
                return tuple(self.place(each) for each in part)
        if is_dataclass(part) and not isinstance(part, type):
            return replace(part, **{each.name: self.place(getattr(part, each.name)) for each in fields(part)})
        return part

    def _make(self, whole: Parameter) -> Parameter:
        sources = self._table.sources if whole.data is self._table.data else whole.sources
        shape, dtype = tuple(whole.data.shape), whole.data.dtype
        made = self._allocator.parameter(whole.name, *shape, sources=sources, dtype=dtype)
        self._made[id(whole.data)] = made
        return made
