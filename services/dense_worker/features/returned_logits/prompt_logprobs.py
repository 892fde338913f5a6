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
from services.dense_worker.features.returned_logits.reports import PromptLogprobs
from services.dense_worker.sampling.logprobs import RankedTokens, concatenate, rank_tokens
from services.dense_worker.sampling.upload import upload
from services.step import PlanEntry, SequenceSpec

MAX_ROWS_AT_A_TIME = 256
MAX_SHARED_TOP = 32  # prompts that report more most likely tokens do not make all others of the step compute as many


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """The prompt tokens whose log-probabilities a step computes."""

    seq_id: int
    start: int  # index in the prompt of the first one, at least 1
    token_ids: SequenceOf[int]
    first_row: int  # row of the step that predicts the first token; the next row predicts the next
    num_logprobs: int  # most likely tokens to report with each
    named: SequenceOf[int]  # further tokens to report with each


def find_span(entry: PlanEntry, spec: SequenceSpec, first_row: int) -> PromptSpan | None:
    """The span of an entry whose tokens begin at `first_row`; None if no prompt log-probabilities are needed."""
    assert spec.num_prompt_logprobs is not None
    start = entry.position + 1
    token_ids = tuple(spec.prompt_token_ids[start : start + entry.num_tokens])
    if not token_ids:
        return None
    return PromptSpan(
        entry.seq_id, start, token_ids, first_row, spec.num_prompt_logprobs, spec.sampling.logprob_token_ids
    )


@dataclass(frozen=True, slots=True)
class RankedSpans:
    """Spans and what is reported of their tokens. The parts differ in how many most likely tokens they have."""

    parts: SequenceOf[tuple[SequenceOf[PromptSpan], RankedTokens]]

    def to_host(self) -> RankedSpans:
        """See `RankedTokens.to_host`."""
        return RankedSpans([(spans, ranked.to_host()) for spans, ranked in self.parts])

    def read(self) -> list[PromptLogprobs]:
        """The results, one per span, when they have been copied to the host."""
        found = []
        for spans, ranked in self.parts:
            tokens = iter(ranked.read([span.num_logprobs for span in spans for _ in span.token_ids]))
            found += [
                PromptLogprobs(span.seq_id, span.start, [next(tokens) for _ in span.token_ids]) for span in spans
            ]
        return found


def rank_prompt_tokens(
    backend: DenseBackend,
    attn_out: torch.Tensor,
    residual: torch.Tensor,
    spans: SequenceOf[PromptSpan],
    max_num_rows: int,
) -> RankedSpans:
    """Ranks the tokens of the spans: one row per token. Calls `DenseBackend.last` itself.

    attn_out: [num_tokens, attn_size] of the last layer; residual: [num_tokens, hidden];
    max_num_rows: maximum number of rows in one call of `last`
    """
    groups: dict[int, list[PromptSpan]] = {}  # all rows of a group have as many most likely tokens as its widest one
    for span in spans:
        groups.setdefault(span.num_logprobs if span.num_logprobs > MAX_SHARED_TOP else 0, []).append(span)
    size = min(MAX_ROWS_AT_A_TIME, max_num_rows)
    return RankedSpans(
        [(group, _rank_group(backend, attn_out, residual, group, size)) for group in groups.values()]
    )


def _rank_group(
    backend: DenseBackend, attn_out: torch.Tensor, residual: torch.Tensor, spans: SequenceOf[PromptSpan], size: int
) -> RankedTokens:
    rows, token_ids = [], []
    named: list[SequenceOf[int]] = []
    for span in spans:
        rows.append(np.arange(span.first_row, span.first_row + len(span.token_ids)))
        token_ids += span.token_ids
        named += [span.named] * len(span.token_ids)
    packed = np.stack([np.concatenate(rows), np.array(token_ids, dtype=np.int64)])
    device_rows, device_token_ids = upload(packed, attn_out.device)
    num_top = max(span.num_logprobs for span in spans)
    width = max(map(len, named))
    return concatenate(
        rank_tokens(
            backend.last(attn_out, residual, device_rows[start : start + size]),
            device_token_ids[start : start + size],
            num_top,
            named[start : start + size] if width else None,
            width,
        )
        for start in range(0, len(token_ids), size)
    )
