"""`StepPart`: what a step does for the rows of one feature; with it, what a feature sees of a step. Engine thread."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from services.dense_worker.features.sequence_feature import SequenceFeature
from services.step import PlanEntries, StepResult

if TYPE_CHECKING:
    import torch

    from services.channel import Channel
    from services.dense_worker.backends import DenseBackend, InputEmbeds


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """The sequences of a batch that have a feature, and what they have of it. Steps of the same batch share it."""

    indexes: np.ndarray  # int64 [n], of their entries in the batch; ascending
    features: SequenceOf[SequenceFeature]  # [n]


@dataclass(frozen=True)
class StepView:
    """The step that is being prepared. It is only made if any of its sequences has a feature."""

    entries: PlanEntries
    token_ids: np.ndarray  # int64 [num_tokens]; arbitrary where the host does not know the token
    known: SequenceOf[list[int]]  # of each entry: all tokens of its sequence that the host knows, its prompt first
    num_known: np.ndarray  # int64 [num_entries]: how many these are
    extra_rows: SequenceOf[tuple[int, int]] = ()  # see `StepPlan`

    @cached_property
    def row_starts(self) -> np.ndarray:
        """int64 [num_entries]: the row of each entry's first token."""
        return np.cumsum(self.entries.num_tokens) - self.entries.num_tokens

    @cached_property
    def sampled_starts(self) -> np.ndarray:
        """int64 [num_entries]: the place of each entry's first sampled row among all sampled rows."""
        return np.cumsum(self.entries.num_logits) - self.entries.num_logits


@dataclass(frozen=True, slots=True)
class FurtherRows:
    """What computes the last part of the model for rows besides those that are sampled, once all layers have run."""

    backend: DenseBackend
    attn_out: torch.Tensor  # [num_tokens, attn_size], of the last layer
    residual: torch.Tensor  # [num_tokens, hidden]
    max_num_rows: int  # in one call of `DenseBackend.last`


class StepPart:
    """Made by `Feature.prepare_step`. A feature overrides what it needs; the methods are called in this order."""

    hidden_rows: np.ndarray | None = None  # int64: rows of the step whose hidden states `take_hidden` gets; None: none
    needs_further_rows: bool = False  # `compute_rows` has something to compute
    waits_for_tokens: bool = False  # sampling must wait until the host knows the tokens of the step before
    reads_layers: bool = False  # `take_layer` takes something; then the step is in no CUDA graph
    input_embeds: InputEmbeds | None = None  # vectors in place of embeddings

    @property
    def is_ready(self) -> bool:
        """Whether editors find at once what they need of it, the tokens of the step before being known."""
        return True

    def before_layers(self, channel: Channel) -> None:
        """Enqueues, or does, what crosses the seam before the layers of the step. Raises the errors of `Channel.wait`.
        """

    def take_layer(self, layer: int, rows: torch.Tensor) -> None:
        """Enqueues what it takes of a layer's rows of the seam, [num_tokens, widest layer], before attention has them.

        Called for all layers in order, if it `reads_layers`.
        """

    def copy_logits(self, logits: torch.Tensor) -> None:
        """Enqueues what it takes of the logits, [num_sampled, vocab_size], before the sampler changes them."""

    def take_hidden(self, hidden: torch.Tensor) -> None:
        """Enqueues what it takes of the hidden states of its rows after the final norm, [num_rows, hidden], before the
        next step overwrites them. Called if `hidden_rows` has any.
        """

    def compute_rows(self, further: FurtherRows) -> None:
        """Enqueues further rows, after the sampler."""

    def read(self, result: StepResult) -> None:
        """The device has run the step: adds to `reports` and `ended` of the result, which has the tokens."""


def group_by_type(features_of: SequenceOf[SequenceOf[SequenceFeature]]) -> dict[type[SequenceFeature], FeatureRows]:
    """The rows of each feature in a batch; `features_of`: of each entry. Nearly always none."""
    found: dict[type[SequenceFeature], tuple[list[int], list[SequenceFeature]]] = {}
    for index, features in enumerate(features_of):
        for each in features:
            indexes, of_type = found.setdefault(type(each), ([], []))
            indexes.append(index)
            of_type.append(each)
    return {kind: FeatureRows(np.array(indexes, np.int64), of_type) for kind, (indexes, of_type) in found.items()}
