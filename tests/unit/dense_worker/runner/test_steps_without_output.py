"""Steps of sequences whose output nobody reads compute no logits. On a GPU, their graphs give hidden states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from services.common.pooling.pooling_config import PoolingConfig, PoolingMethod
from services.common.sampling_params import SamplingParams
from services.dense_worker.features.pooling.pooling_feature import PooledSequence, PoolingFeature
from services.dense_worker.features.pooling.pooling_head import PoolingHead
from services.dense_worker.runner import cuda_model_runner
from services.dense_worker.runner.cuda_model_runner import CudaModelRunner
from services.dense_worker.runner.model_runner import ModelRunner
from services.dense_worker.sampling.sampler import Sampler
from services.step import PlanEntry, StepResult
from tests.support.dense.sequences import make_state
from tests.support.dense.without_cuda import EagerGraphs, FakeChannel, TorchWithoutCuda
from tests.support.plans import plan_of

MAX_NUM_SEQS, MAX_NUM_TOKENS, HIDDEN, VOCAB_SIZE = 4, 32, 3, 50
CHANNEL: Any = FakeChannel()
PROMPTS = {1: (5, 6, 7), 2: (9,), 3: tuple(range(20, 40))}
TEXT = (11, 12)  # of a sequence with output
# The last two steps have a row of the sequence with output, too.
STEPS = [[(3, 12)], [(1, 2), (3, 5)], [(1, 1), (3, 3)], [(2, 1), (4, 2)], [(4, 1)]]
TABLE = torch.randn(VOCAB_SIZE, HIDDEN, generator=torch.Generator().manual_seed(0))
TRUTH = {
    PoolingMethod.LAST: lambda states: states[-1],
    PoolingMethod.CLS: lambda states: states[0],
    PoolingMethod.MEAN: lambda states: states.mean(0),
}


class Tables:
    """A `DenseBackend` of one layer, whose hidden states are rows of a table. It notes the rows of each `last`."""

    always_ends = False

    skips_logits = True

    def __init__(self) -> None:
        self.num_logits: list[int] = []

    def begin_step(self, plan: object, num_tokens: int, num_sampled: int = 0, input_embeds: object = None) -> None: ...

    def first(self, token_ids: torch.Tensor, qkv: torch.Tensor, input_embeds: object = None) -> torch.Tensor:
        return TABLE[token_ids]

    def last(
        self, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor, hidden_out: object = None
    ) -> torch.Tensor:
        self.num_logits.append(len(rows))
        return torch.zeros(len(rows), VOCAB_SIZE)

    def hidden(self, attn_out: object, residual: torch.Tensor, rows: torch.Tensor, hidden_out: torch.Tensor) -> None:
        hidden_out.copy_(residual[rows])


class NotedGraphs(EagerGraphs):
    """`StepGraphs` that notes the graphs of steps."""

    found: list[Any]

    def find(self, size: Any) -> SimpleNamespace:
        self.found.append(size)
        return super().find(size)


def make_runner(is_cuda: bool, backend: Any, method: PoolingMethod, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    features = [PoolingFeature(PoolingConfig(method, False), PoolingHead())]
    sampler = Sampler(MAX_NUM_SEQS, VOCAB_SIZE, "cpu")
    if not is_cuda:
        return ModelRunner(backend, sampler, 1, MAX_NUM_SEQS, features)
    monkeypatch.setattr(cuda_model_runner, "torch", TorchWithoutCuda())
    monkeypatch.setattr(cuda_model_runner, "StepGraphs", NotedGraphs)
    monkeypatch.setattr(NotedGraphs, "found", [], raising=False)
    config: Any = SimpleNamespace(
        num_layers=1, vocab_size=VOCAB_SIZE, qkv_size=1, attn_size=1, num_middle_kinds=1, hidden_size=HIDDEN
    )
    limits = (MAX_NUM_SEQS, MAX_NUM_TOKENS)
    runner = CudaModelRunner(
        backend, sampler, config, torch.float32, *limits, captures_lazily=True, features=features
    )
    runner.attach([CHANNEL])
    return runner


def run_steps(runner: ModelRunner, method: PoolingMethod) -> tuple[dict[int, np.ndarray], list[StepResult]]:
    """The vector of each sequence, and the results of all steps."""
    sampling = SamplingParams(temperature=0.0)
    for seq_id, prompt in PROMPTS.items():
        runner.open(make_state(seq_id, prompt, len(prompt), sampling, features=[PooledSequence(len(prompt), method)]))
    runner.open(make_state(4, TEXT, 2, sampling))
    lengths = {seq_id: len(prompt) for seq_id, prompt in PROMPTS.items()} | {4: len(TEXT)}
    positions = dict.fromkeys(lengths, 0)
    vectors, results = dict[int, np.ndarray](), list[StepResult]()
    for step_id, counts in enumerate(STEPS, 1):
        entries = []
        for seq_id, count in counts:
            end = positions[seq_id] + count
            entries.append(PlanEntry(seq_id, positions[seq_id], count, int(end >= lengths[seq_id])))
            positions[seq_id] = end
        results.append(runner.launch(plan_of(step_id, *entries), CHANNEL).collect())
        for each in results[-1].reports:
            assert each.seq_id not in vectors
            vectors[each.seq_id] = each.rows[0]
    return vectors, results


@pytest.mark.parametrize("is_cuda", [False, True])
@pytest.mark.parametrize("method", TRUTH)
def test_vectors_are_those_of_the_hidden_states(
    method: PoolingMethod, is_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Tables()
    vectors, results = run_steps(make_runner(is_cuda, backend, method, monkeypatch), method)
    assert vectors.keys() == PROMPTS.keys()
    for seq_id, prompt in PROMPTS.items():
        truth = TRUTH[method](TABLE[list(prompt)])
        torch.testing.assert_close(torch.from_numpy(vectors[seq_id].copy()), truth, rtol=0, atol=1e-6)
    counts = [each.token_ids.counts.tolist() for each in results]
    assert counts == [[0], [0, 0], [1, 1], [1, 1], [1]], "each sequence gets the token that ends it"
    assert [each.token_ids.of(0) for each in results[:3]] == [[], [], [0]]


def test_only_steps_with_output_compute_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Tables()
    run_steps(make_runner(False, backend, PoolingMethod.MEAN, monkeypatch), PoolingMethod.MEAN)
    assert backend.num_logits == [2, 1]


@pytest.mark.parametrize("method", [PoolingMethod.LAST, PoolingMethod.MEAN])
def test_on_a_gpu_steps_without_output_have_graphs_of_their_own(
    method: PoolingMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also long ones, and those of the middle of a prompt. A step that has both kinds of rows runs uncaptured."""
    run_steps(make_runner(True, Tables(), method, monkeypatch), method)
    most = MAX_NUM_TOKENS if method is PoolingMethod.MEAN else MAX_NUM_SEQS
    without_output, plain = NotedGraphs.found[:3], NotedGraphs.found[3:]
    assert [(size.num_rows, size.num_sampled, size.num_hidden) for size in without_output] == [
        (rows, 0, min(rows, most)) for rows in (12, 8, 4)
    ]
    assert [size.num_hidden for size in plain] == [None], "the last step"
