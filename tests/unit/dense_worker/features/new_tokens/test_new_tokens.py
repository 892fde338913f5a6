"""Of so many tokens the last one is new, as a loop over the logits says; also on a GPU, whose steps run ahead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.common.sampling_params import SamplingParams
from services.dense_worker.features.new_tokens.new_token_editor import SequenceNewTokens
from services.dense_worker.features.new_tokens.new_tokens_feature import NewTokensFeature
from services.dense_worker.runner import cuda_model_runner
from services.dense_worker.runner.cuda_model_runner import CudaModelRunner
from services.dense_worker.runner.model_runner import ModelRunner, RunningStep
from services.dense_worker.sampling.editors import EDITORS
from services.dense_worker.sampling.sampler import Sampler
from services.pb import dense_pb2
from services.step import PlanEntry
from tests.support.dense.sequences import make_state, new_sequence
from tests.support.dense.without_cuda import EagerGraphs, FakeChannel, TorchWithoutCuda
from tests.support.plans import plan_of

VOCAB_SIZE, MAX_NUM_SEQS, NUM_STEPS = 7, 4, 20
PROMPT = (5, 6)
CHANNEL: Any = FakeChannel()
FEATURE = NewTokensFeature()


class RandomLogits:
    """A `DenseBackend` of one layer. The logits depend on the last token alone, so that plain greedy outputs repeat."""

    table = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))

    def begin_step(self, plan: object, num_tokens: int) -> None: ...

    def first(self, token_ids: torch.Tensor, qkv: torch.Tensor, input_embeds: object = None) -> torch.Tensor:
        return token_ids[:, None]

    def last(
        self, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor, hidden_out: object = None
    ) -> torch.Tensor:
        return self.table[residual[rows, 0]]


def expected_output(every: int, num_tokens: int) -> list[int]:
    """Where all tokens of the vocabulary are in the output, any may come."""
    output: list[int] = []
    while len(output) < num_tokens:
        logits = RandomLogits.table[[*PROMPT, *output][-1]].tolist()
        choices = set(range(VOCAB_SIZE))
        if every and not (len(output) + 1) % every:
            choices = choices - set(output) or choices
        output.append(max(choices, key=lambda token_id: logits[token_id]))
    return output


@pytest.fixture(params=[False, True], ids=["cpu", "gpu"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    backend: Any = RandomLogits()
    sampler = Sampler(MAX_NUM_SEQS, VOCAB_SIZE, "cpu", (*EDITORS, *FEATURE.editors))
    if not request.param:
        return ModelRunner(backend, sampler, 1, MAX_NUM_SEQS, [FEATURE])
    monkeypatch.setattr(cuda_model_runner, "torch", TorchWithoutCuda())
    monkeypatch.setattr(cuda_model_runner, "StepGraphs", EagerGraphs)
    config: Any = SimpleNamespace(num_layers=1, vocab_size=VOCAB_SIZE, qkv_size=1, attn_size=1)
    arguments = (backend, sampler, config, torch.float32, MAX_NUM_SEQS, 32)
    return CudaModelRunner(*arguments, captures_lazily=True, features=[FEATURE])


def open_sequence(runner: ModelRunner, seq_id: int, every: int, output: list[int]) -> None:
    sampling = SamplingParams(temperature=0.0, new_token_every=every)
    spec = new_sequence(seq_id, "r", PROMPT, sampling, 100).spec
    found = FEATURE.admit(spec, dense_pb2.Submit(), stream=1)
    assert (found is None) == (not every)
    features = () if found is None else (found,)
    runner.open(make_state(seq_id, (*PROMPT, *output), len(PROMPT), sampling, features=features))


def run_ahead(runner: ModelRunner, everies: list[int], num_known: int = 0) -> list[list[int]]:
    """The outputs of sequences with these options. Each step is launched before the one before is collected."""
    runner.attach([CHANNEL])
    for seq_id, every in enumerate(everies, 1):
        open_sequence(runner, seq_id, every, expected_output(every, num_known))
    outputs: list[list[int]] = [[] for _ in everies]
    running: RunningStep | None = None
    first = len(PROMPT) + num_known
    for step in range(NUM_STEPS + 1):
        position, num_tokens = (first + step - 1, 1) if step else (0, first)
        entries = [PlanEntry(seq_id, position, num_tokens, 1) for seq_id in range(1, len(everies) + 1)]
        launched = runner.launch(plan_of(step + 1, *entries), CHANNEL) if step < NUM_STEPS else None
        if running is not None:
            assert running.is_done()
            for output, token_ids in zip(outputs, running.collect().token_ids.rows(), strict=True):
                output += token_ids
        running = launched
    return outputs


@pytest.mark.parametrize("num_known", [0, 4])
def test_outputs_are_those_of_a_loop_also_if_they_are_restored(runner: ModelRunner, num_known: int) -> None:
    """After some steps all tokens of the vocabulary are in the output."""
    everies = [2, 0, 1, 3]
    expected = [expected_output(every, num_known + NUM_STEPS)[num_known:] for every in everies]
    assert expected[0] != expected[1] != expected[3]
    assert run_ahead(runner, everies, num_known) == expected


def test_a_fork_has_the_tokens_before_it_and_goes_its_own_way() -> None:
    sequence = SequenceNewTokens(2, 3, [4, 5])
    fork = sequence.fork()
    fork.output_token_ids.add(6)
    assert (fork.every, fork.num_prompt_tokens, fork.output_token_ids) == (2, 3, {4, 5, 6})
    assert sequence.output_token_ids == {4, 5}


def test_drafts_are_not_allowed() -> None:
    assert not SequenceNewTokens(2, 3).allows_drafts
