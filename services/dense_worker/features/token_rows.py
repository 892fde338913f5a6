"""Which rows of a step belong to tokens that a feature reports, and copies of what is computed for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.dense_worker.features.sequence_feature import PromptReport
from services.dense_worker.sampling.upload import upload

if TYPE_CHECKING:
    from services.dense_worker.features.step_part import FeatureRows, FurtherRows, StepView

MAX_ROWS_AT_A_TIME = 256  # so that their logits take limited memory


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Consecutive tokens of a sequence of which a step reports something."""

    seq_id: int
    start: int  # index of the first one in the sequence
    first_row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Rows of an entry that are sampled: of an output token, and of drafts, which may turn out to be none."""

    index: int  # of the entry
    seq_id: int
    start: int  # index of the first row's token, among the output tokens
    first_row: int  # among all sampled rows of the step
    num_rows: int


def sampled_rows(step: StepView, index: int, num_prompt_tokens: int) -> SampledRows | None:
    """Those of one entry, whose sequence has such a prompt; None: it has none."""
    entry = step.entries[index]
    if not entry.num_logits:
        return None
    start = entry.position + entry.num_tokens - entry.num_logits + 1 - num_prompt_tokens
    return SampledRows(index, entry.seq_id, start, step.sampled_starts.item(index), entry.num_logits)


def computed_tokens(step: StepView, index: int) -> TokenRows:
    """All tokens of one entry of the step."""
    entry = step.entries[index]
    return TokenRows(entry.seq_id, entry.position, step.row_starts.item(index), entry.num_tokens)


def prompt_tokens(step: StepView, rows: FeatureRows) -> list[TokenRows]:
    """The tokens of prompts that have not been reported; those of the feature's rows that have any in the step."""
    found = []
    for index, feature in zip(rows.indexes.tolist(), rows.features, strict=True):
        assert isinstance(feature, PromptReport)
        if not feature.is_over:
            entry = step.entries[index]
            num_rows = min(entry.num_tokens, feature.spec.num_prompt_tokens - entry.position)
            if num_rows > 0:
                found.append(TokenRows(entry.seq_id, entry.position, step.row_starts.item(index), num_rows))
    return found


def rows_of(tokens: SequenceOf[TokenRows]) -> np.ndarray:
    """The rows of all of them, in order: int64."""
    return np.concatenate([np.arange(each.first_row, each.first_row + each.num_rows) for each in tokens])


def to_host(values: torch.Tensor) -> torch.Tensor:
    """A copy in float32 on the host, which is filled when the device has run all work enqueued so far."""
    host = torch.empty(values.shape, dtype=torch.float32, pin_memory=values.device.type == "cuda")
    host.copy_(values, non_blocking=True)
    return host


def copy_rows(
    compute: Callable[[torch.Tensor], torch.Tensor], tokens: SequenceOf[TokenRows], further: FurtherRows
) -> torch.Tensor:
    """What `compute` gives for the rows of all tokens, some rows at a time: float32, on the host.

    compute: indexes of rows, on the device -> their values [num_rows, n]. The copy is filled when the device has run
    all work enqueued so far.
    """
    device, size = further.attn_out.device, min(MAX_ROWS_AT_A_TIME, further.max_num_rows)
    rows = rows_of(tokens)
    host: torch.Tensor | None = None
    begin = 0
    for some_rows in upload(rows, device).split(size):
        values = compute(some_rows)
        if host is None:
            shape = (len(rows), values.shape[1])
            host = torch.empty(shape, dtype=torch.float32, pin_memory=values.device.type == "cuda")
        host[begin : begin + len(some_rows)].copy_(values, non_blocking=True)
        begin += len(some_rows)
    assert host is not None, "there are rows"
    return host


def split_rows(tokens: SequenceOf[TokenRows], values: torch.Tensor) -> Iterator[tuple[TokenRows, np.ndarray]]:
    """The rows of each: float32 [num_rows, n]."""
    end = 0
    for each in tokens:
        begin, end = end, end + each.num_rows
        yield each, values[begin:end].numpy()
