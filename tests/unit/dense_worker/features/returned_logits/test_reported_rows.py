"""What a step reports of prompts and of output tokens, against a model whose logits are known."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from services.common.sampling_params import SamplingParams
from services.dense_worker.features.hidden_states.hidden_states_feature import OF_ANSWER, SequenceHiddenStates
from services.dense_worker.runner.model_runner import ModelRunner
from services.dense_worker.sampling.sampler import Sampler
from services.step import PlanEntry, StepResult
from tests.support.dense.sequences import REPORTING, make_state
from tests.support.plans import plan_of
from tests.support.reports import prompt_logprobs, read_prompt_logprobs
from tests.unit.dense_worker.runner.test_runner_sequences import CHANNEL, NUM_LAYERS, VOCAB_SIZE, NextNumber

PROMPT = (5, 6, 9, 3)


class Scores(NextNumber):
    """The logits after token t are row t of a table; its hidden state is t."""

    table = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))

    def last(
        self, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor, hidden_out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.table[residual[rows, 0]]

    def hidden(
        self, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor, hidden_out: torch.Tensor
    ) -> None:
        hidden_out.copy_(residual[rows])


def make_runner() -> ModelRunner:
    backend: Any = Scores()
    runner = ModelRunner(backend, Sampler(4, VOCAB_SIZE, "cpu"), NUM_LAYERS, 4, REPORTING)
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
    open_beside_a_plain_one(runner, features=prompt_logprobs(2))
    first = run(runner, PlanEntry(1, 0, 2, 1), PlanEntry(2, 0, 1, 0)).reports
    second = run(runner, PlanEntry(2, 1, 3, 1)).reports
    found = [*first, *second]
    assert {(each.seq_id, each.feature) for each in found} == {(2, "prompt_logprobs")}
    assert [each.start for each in found] == [1, 2]
    tokens = [token for each in found for token in read_prompt_logprobs(len(each.rows), each.rows.tobytes())]
    expected = [logprob(before, after) for before, after in pairwise(PROMPT)]
    assert [token.logprob for token in tokens] == pytest.approx(expected)
    for token, before in zip(tokens, PROMPT, strict=False):
        assert [token_id for token_id, _ in token.top] == Scores.table[before].topk(2).indices.tolist()


@pytest.mark.parametrize("name", ["context_logits", "hidden_states", "progress"])
def test_a_report_of_each_token_of_the_prompt(name: str) -> None:
    runner = make_runner()
    open_beside_a_plain_one(runner, features={name: b""})
    first = run(runner, PlanEntry(1, 0, 2, 1), PlanEntry(2, 0, 3, 0)).reports
    second = run(runner, PlanEntry(2, 3, 1, 1)).reports
    found = [*first, *second]
    assert {(each.seq_id, each.feature) for each in found} == {(2, name)}
    assert [(each.start, len(each.rows)) for each in found] == [(0, 3), (3, 1)]
    values = np.concatenate([each.rows for each in found])
    if name == "context_logits":
        assert np.array_equal(values, Scores.table[list(PROMPT)].numpy())
    elif name == "hidden_states":
        assert values[:, 0].tolist() == list(PROMPT)
    else:
        assert values.shape == (4, 0)


def test_hidden_states_of_an_answer_are_those_of_its_tokens_alone() -> None:
    """So its prompt may be in the prefix cache, and other answers may be forked from it."""
    runner = make_runner()
    open_beside_a_plain_one(runner, features={"hidden_states": OF_ANSWER})
    feature = SequenceHiddenStates(len(PROMPT))
    assert not feature.reports_prompt and not feature.ignores_prefix_cache and feature.reports
    result = run(runner, PlanEntry(1, 0, 2, 1), PlanEntry(2, 0, 4, 1))
    [[_], [token_id]] = result.token_ids.rows()
    assert not result.reports
    [report] = run(runner, PlanEntry(1, 2, 1, 1), PlanEntry(2, 4, 1, 1)).reports
    assert (report.start, report.rows[:, 0].tolist()) == (len(PROMPT), [token_id])
    [again] = run(runner, PlanEntry(2, 2, 3, 1), PlanEntry(1, 3, 1, 1)).reports  # as after a preemption
    assert (again.start, again.rows[:, 0].tolist()) == (len(PROMPT), [token_id])


def test_logits_of_output_tokens_are_those_that_the_sampler_got() -> None:
    runner = make_runner()
    open_beside_a_plain_one(runner, features={"generation_logits": b""})
    result = run(runner, PlanEntry(1, 0, 2, 1), PlanEntry(2, 0, 4, 1))
    [[_], [token_id]] = result.token_ids.rows()
    [first] = result.reports
    [second] = run(runner, PlanEntry(1, 2, 1, 1), PlanEntry(2, 4, 1, 1)).reports
    assert (first.start, second.start) == (0, 1) and first.feature == second.feature == "generation_logits"
    assert np.array_equal(first.rows, Scores.table[[PROMPT[-1]]].numpy())
    assert np.array_equal(second.rows, Scores.table[[token_id]].numpy())


def test_logits_after_wrong_drafts_are_not_reported() -> None:
    runner = make_runner()
    open_beside_a_plain_one(runner, features={"generation_logits": b""})
    best = Scores.table.argmax(-1).tolist()
    right, wrong = best[PROMPT[-1]], (best[best[PROMPT[-1]]] + 1) % VOCAB_SIZE
    result = run(runner, PlanEntry(2, 0, 6, 3, (right, wrong)), PlanEntry(1, 0, 2, 1))
    [report] = result.reports
    assert len(result.token_ids.rows()[0]) == 2 and (report.seq_id, report.start) == (2, 0)
    assert np.array_equal(report.rows, Scores.table[[PROMPT[-1], right]].numpy())


def test_a_sequence_may_report_all_of_them_at_once() -> None:
    runner = make_runner()
    names = ["context_logits", "generation_logits", "hidden_states", "progress"]
    open_beside_a_plain_one(runner, features=dict.fromkeys(names, b"") | prompt_logprobs(0))
    result = run(runner, PlanEntry(1, 0, 2, 1), PlanEntry(2, 0, 4, 1))
    rows = {each.feature: each.rows for each in result.reports}
    assert sorted(rows) == sorted([*names, "prompt_logprobs"])
    assert np.array_equal(rows["context_logits"], Scores.table[list(PROMPT)].numpy())
    assert np.array_equal(rows["generation_logits"], rows["context_logits"][-1:])
    assert rows["hidden_states"][:, 0].tolist() == list(PROMPT)
