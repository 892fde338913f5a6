"""The first and last parts of a model: token ids become the residual, and the residual becomes logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional as F

from services.dense_worker.backends import GivenEmbeds
from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.kernels.norm.norm import Norm
from services.dense_worker.model.operations import Operations, Residual
from services.dense_worker.parameters import Parameter


@dataclass(frozen=True, slots=True)
class LearnedPositions:
    """A table with a row for each position, which is added to the embedding."""

    table: Parameter  # [num_positions + offset, hidden]
    offset: int  # the row of position 0


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Makes the inputs of all layers: a row of a table for each token, plus a normalised projection of its embedding.

    A vector that is given in place of an embedding has the row of token 0, as images have in transformers.
    """

    table: Parameter  # [vocab, num_layers * size]
    projection: Linear  # [hidden -> num_layers * size]
    norm: Norm  # of the projection for one layer
    multiplier: float  # of the table

    def forward(self, operations: Operations, token_ids: torch.Tensor, residual: Residual) -> Residual:
        """token_ids int64 [n], residual [n, hidden] -> the residual."""
        residual, projected = operations.norm_linear(residual, None, self.projection)
        projected = (projected * self.projection.in_features**-0.5).unflatten(1, (-1, len(self.norm.weight.data)))
        of_tokens = F.embedding(token_ids, self.table.data) * self.multiplier
        inputs = (self.norm.normalize(projected) + of_tokens.view(projected.shape)) * 2**-0.5
        operations.keep_layer_inputs(inputs)
        return residual


@dataclass(frozen=True, slots=True)
class Embedding:
    """Looks up a row of the table for each token. Some families multiply it, add positions or normalise it."""

    table: Parameter | None  # [vocab, embedding_size]; None: only `of_rows` is called
    multiplier: float
    positions: LearnedPositions | None
    norm: Norm | None
    is_multiplier_of_table: bool  # vectors that are given in place of rows are not multiplied
    layer_inputs: LayerInputs | None
    projection: Linear | None  # [embedding_size -> hidden]; None: the sizes are equal

    def forward(
        self, operations: Operations, token_ids: torch.Tensor, input_embeds: GivenEmbeds | None = None
    ) -> Residual:
        """token_ids int64 [n] -> residual [n, hidden]. `input_embeds` take the place of rows of the table."""
        return self.of_rows(operations, operations.embed(self.table, token_ids), token_ids, input_embeds)

    @property
    def is_lookup(self) -> bool:
        """Whether the rows of the table are the residual."""
        return self.multiplier == 1.0 and (self.projection, self.positions, self.norm, self.layer_inputs) == (None,) * 4

    def of_rows(
        self,
        operations: Operations,
        residual: Residual,
        token_ids: torch.Tensor | None,
        input_embeds: GivenEmbeds | None = None,
    ) -> Residual:
        """As `forward`, with the rows of the table; they may be overwritten. `token_ids` only for `layer_inputs`."""
        hidden = residual.hidden
        if input_embeds is not None and not self.is_multiplier_of_table:
            input_embeds.put_into(hidden)
        if self.multiplier != 1.0:
            hidden = hidden * self.multiplier
        if input_embeds is not None and self.is_multiplier_of_table:
            input_embeds.put_into(hidden)
        if self.projection is not None:
            hidden = operations.linear(self.projection, hidden)
        if self.positions is not None:
            rows = operations.positions(len(hidden)) + self.positions.offset
            hidden = hidden + F.embedding(rows, self.positions.table.data)
        if self.norm is not None:
            hidden = self.norm.normalize(hidden)
        residual = residual if hidden is residual.hidden else Residual(hidden)
        return residual if self.layer_inputs is None else self.layer_inputs.forward(operations, token_ids, residual)


@dataclass(frozen=True, slots=True)
class Head:
    """The final norm and the projection to the vocabulary. Some families scale the logits and cap them softly."""

    norm: Norm | None  # None: it reads the residual itself
    lm_head: Linear
    multiplier: float = 1.0
    softcap: float | None = None
    projection: Linear | None = None  # [hidden -> embedding_size], of what the norm gives
    passes_rows_on: ClassVar[bool] = False  # to another process, which computes logits of them

    @property
    def rescales(self) -> bool:
        """Whether logits are computed from the product, which is in float32."""
        return self.multiplier != 1.0 or self.softcap is not None

    def select(
        self, operations: Operations, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, Residual]:
        """What the last layer's second half reads, as `Operations.select_rows`."""
        return operations.select_rows(attn_out, residual, rows)

    def forward(
        self, operations: Operations, residual: Residual, hidden_out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """residual [n, hidden] -> logits [n, vocab], in the model's dtype, to which they are rounded, or in float32.

        `hidden_out` [n, hidden] gets what the norm gives.
        """
        norm = self.norm
        if self.projection is not None:
            residual, hidden = operations.normalize(residual, norm)
            if hidden_out is not None:
                hidden_out.copy_(hidden)
            residual, norm, hidden_out = Residual(operations.linear(self.projection, hidden)), None, None
        logits = operations.logits(residual, norm, self.lm_head, hidden_out)
        if self.rescales:
            logits = logits.float()
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        if self.softcap is not None:
            logits = torch.tanh(logits * (1 / self.softcap)) * self.softcap
        return logits
