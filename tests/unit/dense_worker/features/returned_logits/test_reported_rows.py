"""What a step reports of its rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from services.common.sampling_params import SamplingParams
from services.dense_worker.features.returned_logits.reported_rows import ReportedRows
from services.dense_worker.features.returned_logits.reports import PromptLogprobs
from services.dense_worker.features.returned_logits.sequence_reports import SequenceReports
from services.dense_worker.features.step_part import FeatureRows, FurtherRows, StepView
from services.step import PlanEntries, PlanEntry, RaggedTokens, SequenceSpec, StepResult, TokenReport

PROMPT = [3, 1, 4, 2]


def test_log_probabilities_of_a_prompt_are_those_of_its_logits() -> None:
    """Each row of a prompt but the last one gives those of the token after it."""
    spec = SequenceSpec("r", PROMPT, SamplingParams(), max_tokens=1, num_prompt_logprobs=2)
    reports = SequenceReports(spec, prompt_logprobs=True, token_report=TokenReport.NONE)
    entries = PlanEntries.of([PlanEntry(8, 0, len(PROMPT), 1)])
    view = StepView(entries, torch.tensor(PROMPT), [PROMPT], np.array([len(PROMPT)]))
    part = ReportedRows.of(view, FeatureRows(np.array([0]), [reports]))
    assert part is not None and part.needs_further_rows
    logits = torch.randn(len(PROMPT), 6, generator=torch.Generator().manual_seed(1))
    backend: Any = SimpleNamespace(last=lambda attn_out, residual, rows: logits[rows].clone())
    part.compute_rows(FurtherRows(backend, torch.zeros(len(PROMPT), 4), torch.zeros(len(PROMPT), 4), 2))
    result = StepResult(RaggedTokens.from_rows([[5]]))
    part.read(result)
    [found] = result.reports
    assert isinstance(found, PromptLogprobs) and (found.seq_id, found.start) == (8, 1)
    expected = logits.log_softmax(-1)
    for row, (token_id, given) in enumerate(zip(PROMPT[1:], found.tokens, strict=True)):
        assert given.logprob == pytest.approx(expected[row, token_id].item(), abs=1e-5)
        assert [top for top, _ in given.top] == expected[row].topk(2).indices.tolist()
