"""Log-probabilities of a prompt's own tokens. The row of each token predicts the next token.

A step computes a span of a prompt. Sampling needs the logits of only one row per sequence; here they are computed for
all rows of the span, some rows at a time, so that memory stays limited however long the span is.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from services.dense_worker.backends import DenseBackend
from services.dense_worker.sampling.logprobs import RankedTokens, concatenate, rank_tokens
from services.dense_worker.sampling.upload import upload
from services.step import NewSequence, PlanEntry, PromptLogprobs

MAX_ROWS_AT_A_TIME = 256


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """The prompt tokens whose log-probabilities a step computes."""

    seq_id: int
    start: int  # index in the prompt of the first one, at least 1
    token_ids: SequenceOf[int]
    first_row: int  # row of the step that predicts the first token; the next row predicts the next
    num_logprobs: int  # most likely tokens to report with each


def find_span(entry: PlanEntry, new: NewSequence, first_row: int) -> PromptSpan | None:
    """The span of an entry whose tokens begin at `first_row`; None if no prompt log-probabilities are needed."""
    assert new.num_prompt_logprobs is not None
    start = entry.position + 1
    token_ids = new.token_ids[start : min(start + entry.num_tokens, new.num_prompt_tokens)]
    if not token_ids:
        return None
    return PromptSpan(entry.seq_id, start, token_ids, first_row, new.num_prompt_logprobs)


def rank_prompt_tokens(
    backend: DenseBackend,
    attn_out: torch.Tensor,
    residual: torch.Tensor,
    spans: SequenceOf[PromptSpan],
    max_num_rows: int,
) -> RankedTokens:
    """Ranks the tokens of the spans: one row per token, in order. Calls `DenseBackend.last` itself.

    attn_out: [num_tokens, attn_size] of the last layer; residual: [num_tokens, hidden];
    max_num_rows: maximum number of rows in one call of `last`
    """
    rows, token_ids = [], []
    for span in spans:
        rows.append(np.arange(span.first_row, span.first_row + len(span.token_ids)))
        token_ids += span.token_ids
    packed = np.stack([np.concatenate(rows), np.array(token_ids, dtype=np.int64)])
    device_rows, device_token_ids = upload(packed, attn_out.device)
    num_top = max(span.num_logprobs for span in spans)
    size = min(MAX_ROWS_AT_A_TIME, max_num_rows)
    return concatenate(
        rank_tokens(backend.last(attn_out, residual, some_rows), some_token_ids, num_top)
        for some_rows, some_token_ids in zip(device_rows.split(size), device_token_ids.split(size), strict=True)
    )


def read_prompt_logprobs(spans: SequenceOf[PromptSpan], ranked: RankedTokens) -> list[PromptLogprobs]:
    """The results of `rank_prompt_tokens`, after they have been copied to the host."""
    num_top = [span.num_logprobs for span in spans for _ in span.token_ids]
    tokens = iter(ranked.read(num_top))
    return [
        PromptLogprobs(span.seq_id, span.start, [next(tokens) for _ in span.token_ids])
        for span in spans
    ]
