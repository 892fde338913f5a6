"""A plan with its sequences, and the input of its step: `BoundPlan` and `StepInput`. Part of the model runner."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from services.dense_worker.backends import InputEmbeds
from services.dense_worker.features.feature import Feature
from services.dense_worker.features.sequence_feature import SequenceFeature
from services.dense_worker.features.step_part import FeatureRows, StepPart, group_by_type
from services.dense_worker.runner.batch_rows import BatchRows, RequestState
from services.step import PlanEntries, StepPlan


class Batch:
    """The sequences of a plan, in batch order. Later plans with the same ones share it: mostly nobody comes or goes.

    seq_ids: np.uint64 [num_entries]
    slots, serials, num_prompt_tokens: np.int64 [num_entries], of their rows of `BatchRows`, which stay the same; empty
        until `take_rows`
    forced: np.int64, the indexes of sequences whose tokens are the scheduler's, not those that are sampled; likewise
    features: the rows that have each feature, by the type of what their sequences have of it; nearly always none
    """

    def __init__(self, seq_ids: np.ndarray, sequences: SequenceOf[RequestState]) -> None:
        """Before its first step is prepared, a step under way may still have slots that it needs."""
        self.seq_ids = seq_ids
        self.sequences = sequences
        self.token_lists = [sequence.token_ids for sequence in sequences]
        self.features = self._find_features()
        self.has_output = not self.features or any(_has_output(sequence) for sequence in sequences)
        self.slots = self.serials = self.num_prompt_tokens = self.forced = np.zeros(0, np.int64)
        self.version = 0  # of `BatchRows`, when the rows were looked up
        self.every_row = np.arange(len(seq_ids))  # of a step with one token of each sequence

    def take_rows(self, rows: BatchRows) -> None:
        """Looks up the rows of its sequences, which have slots."""
        slots = self.slots = np.array([sequence.slot for sequence in self.sequences], np.int64)
        self.serials, self.num_prompt_tokens = rows.serials[slots], rows.num_prompt_tokens[slots]
        self.forced = np.flatnonzero(rows.has_forced_tokens[slots])
        self.version = rows.version

    def _find_features(self) -> dict[type[SequenceFeature], FeatureRows]:
        has_any = any([sequence.features for sequence in self.sequences])
        return group_by_type([sequence.features for sequence in self.sequences]) if has_any else {}


@dataclass(frozen=True, slots=True)
class BoundPlan:
    """A plan with its sequences. Later sequences may have the same ids, so they are looked up early."""

    plan: StepPlan
    batch: Batch
    closed: SequenceOf[RequestState]


@dataclass(frozen=True, slots=True)
class StepInput:
    """The input of a step besides the device's own state. Rows are the step's tokens, in batch order.

    Numbers are arrays of the host: for so few, torch takes several times as long.
    """

    bound: BoundPlan
    token_ids: np.ndarray  # int64 [num_tokens]; arbitrary in rows fed from the device
    fed_rows: np.ndarray  # int64 [num_fed]: rows whose token an earlier step leaves on the device
    fed_slots: np.ndarray  # int64 [num_fed]: slots that hold these tokens
    sampled_rows: np.ndarray  # int64 [num_sampled]: rows whose logits the plan needs
    sampled_slots: np.ndarray  # int64 [num_sampled]
    positions: np.ndarray  # int64 [num_sampled]: index of the token to be sampled, in its sequence
    output_lens: np.ndarray  # int64 [num_sampled]: output tokens before it
    parts: Mapping[Feature, StepPart] = field(default_factory=dict)  # what features do in this step; mostly nothing
    needs_residual: bool = False  # rows beyond the sampled ones are computed
    has_output: bool = True  # False: nobody reads its tokens, and no row is sampled, whatever the plan says
    hidden_rows: np.ndarray | None = None  # int64 [n]: those whose hidden states parts take, in their order
    waits_for_tokens: bool = False  # sampling must wait until the host knows the tokens of the step before
    layer_readers: SequenceOf[StepPart] = ()  # the parts that take something of each layer
    input_embeds: InputEmbeds | None = None  # rows with vectors in place of embeddings, on the host


def _has_output(sequence: RequestState) -> bool:
    return all([each.has_output for each in sequence.features])


class SampledRows(NamedTuple):
    """The rows of a step whose logits the plan needs, in order."""

    rows: np.ndarray  # int64 [num_sampled]
    entries: np.ndarray | slice  # int64 [num_sampled]: index of the entry of each; a slice: each entry has one
    num_after: np.ndarray | int  # int64 [num_sampled]: rows of the same entry after it; 0: none

    @classmethod
    def of(cls, entries: PlanEntries, row_ends: np.ndarray) -> SampledRows:
        """row_ends: int64 [num_entries], the row after the last one of each entry"""
        num_logits = entries.num_logits
        if not entries.drafts:
            with_logits = slice(None) if num_logits.all() else np.flatnonzero(num_logits)
            return cls(row_ends[with_logits] - 1, with_logits, 0)
        with_logits = np.repeat(np.arange(len(entries)), num_logits)
        num_after = np.repeat(np.cumsum(num_logits), num_logits) - np.arange(len(with_logits)) - 1
        return cls(row_ends[with_logits] - 1 - num_after, with_logits, num_after)
