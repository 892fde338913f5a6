"""What a step reports of prompts and of output tokens, against a model whose logits are known."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from services.common.sampling_params import SamplingParams
from services.dense_worker.features.returned_logits.reports import Logits, PromptLogprobs
from services.dense_worker.features.returned_logits.returned_logits_feature import ReturnedLogitsFeature
from services.dense_worker.runner.model_runner import ModelRunner
from services.dense_worker.sampling.sampler import Sampler
from services.step import PlanEntry, StepResult, TokenReport
from tests.support.dense.sequences import make_state
from tests.support.plans import plan_of
from tests.unit.dense_worker.runner.test_runner_sequences import CHANNEL, NUM_LAYERS, VOCAB_SIZE, NextNumber

PROMPT = (5, 6, 9, 3)


class Scores(NextNumber):
    """The logits after token t are row t of a table; its hidden state is t."""

    table = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))

    def last(
        self, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor, hidden_out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if hidden_out is not None:
            hidden_out.copy_(residual[rows])
        return self.table[residual[rows, 0]]


def make_runner() -> ModelRunner:
    backend: Any = Scores()
    runner = ModelRunner(backend, Sampler(4, VOCAB_SIZE, "cpu"), NUM_LAYERS, 4, [ReturnedLogitsFeature()])
    runner.attach([CHANNEL])
    return runner


def run(runner: ModelRunner, *entries: PlanEntry) -> StepResult:
    return runner.launch(plan_of(1, *entries), CHANNEL).collect()


def open_beside_a_plain_one(runner: ModelRunner, **asked: Any) -> None:
    sampling = SamplingParams(temperature=0.0)
    runner.open(make_state(1, (7, 8), 2, sampling))
    runner.open(make_state(2, PROMPT, len(PROMPT), sampling, **asked))


def logprob(after: int, token_id: int) -> float:
    return Scores.table[after].log_softmax(-1)[token_id].item()


def test_prompt_logprobs_are_of_every_token_but_the_first_in_chunks() -> None:
    runner = make_runner()
    open_beside_a_plain_one(runner, num_prompt_logprobs=2)
    first = run(runner, PlanEntry(1, 0, 2, 1), PlanEntry(2, 0, 1, 0)).reports
    second = run(runner, PlanEntry(2, 1, 3, 1)).reports
    found = [*first, *second]
    assert all(isinstance(each, PromptLogprobs) and each.seq_id == 2 for each in found)
    assert [each.start for each in found] == [1, 2]
    tokens = [token for each in found for token in each.tokens]
    expected = [logprob(before, after) for before, after in pairwise(PROMPT)]
    assert [token.logprob for token in tokens] == pytest.approx(expected)
    for token, before in zip(tokens, PROMPT, strict=False):
        assert [token_id for token_id, _ in token.top] == Scores.table[before].topk(2).indices.tolist()


@pytest.mark.parametrize("report", [TokenReport.CONTEXT_LOGITS, TokenReport.HIDDEN_STATES, TokenReport.PROGRESS])
def test_a_report_of_each_token_of_the_prompt(report: TokenReport) -> None:
    runner = make_runner()
    open_beside_a_plain_one(runner, token_report=report)
    first = run(runner, PlanEntry(1, 0, 2, 1), PlanEntry(2, 0, 3, 0)).reports
    second = run(runner, PlanEntry(2, 3, 1, 1)).reports
    found = [*first, *second]
    assert all(isinstance(each, Logits) and each.seq_id == 2 and not each.is_output for each in found)
    assert [(each.start, len(each.values)) for each in found] == [(0, 3), (3, 1)]
    values = np.concatenate([each.values for each in found])
    if report is TokenReport.CONTEXT_LOGITS:
        assert np.array_equal(values, Scores.table[list(PROMPT)].numpy())
    elif report is TokenReport.HIDDEN_STATES:
        assert values[:, 0].tolist() == list(PROMPT)
    else:
        assert values.shape == (4, 0)


def test_logits_of_output_tokens_are_those_that_the_sampler_got() -> None:
    runner = make_runner()
    open_beside_a_plain_one(runner, return_generation_logits=True)
    result = run(runner, PlanEntry(1, 0, 2, 1), PlanEntry(2, 0, 4, 1))
    [[_], [token_id]] = result.token_ids.rows()
    [first] = result.reports
    [second] = run(runner, PlanEntry(1, 2, 1, 1), PlanEntry(2, 4, 1, 1)).reports
    assert (first.start, second.start) == (0, 1) and first.is_output and second.is_output
    assert np.array_equal(first.values, Scores.table[[PROMPT[-1]]].numpy())
    assert np.array_equal(second.values, Scores.table[[token_id]].numpy())


def test_logits_after_wrong_drafts_are_not_reported() -> None:
    runner = make_runner()
    open_beside_a_plain_one(runner, return_generation_logits=True)
    best = Scores.table.argmax(-1).tolist()
    right, wrong = best[PROMPT[-1]], (best[best[PROMPT[-1]]] + 1) % VOCAB_SIZE
    result = run(runner, PlanEntry(2, 0, 6, 3, (right, wrong)), PlanEntry(1, 0, 2, 1))
    [report] = result.reports
    assert len(result.token_ids.rows()[0]) == 2 and (report.seq_id, report.start) == (2, 0)
    assert np.array_equal(report.values, Scores.table[[PROMPT[-1], right]].numpy())
