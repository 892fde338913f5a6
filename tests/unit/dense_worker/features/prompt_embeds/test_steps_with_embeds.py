"""Rows of a step with vectors: where they are, in chunks, beside other sequences, and with and without a CUDA graph."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from services.channel import qkv_flag
from services.common.errors import CapacityError
from services.common.sampling_params import SamplingParams
from services.dense_worker.backends import GivenEmbeds, InputEmbeds
from services.dense_worker.features.prompt_embeds.embeds_loader import LoadedEmbeds
from services.dense_worker.features.prompt_embeds.prompt_embeds_feature import PromptEmbedsFeature
from services.dense_worker.runner import cuda_model_runner
from services.dense_worker.runner.cuda_model_runner import CudaModelRunner, rows_with_vectors
from services.dense_worker.runner.model_runner import ModelRunner
from services.dense_worker.sampling.sampler import Sampler
from services.step import Fork, PlanEntry, StepPlan
from tests.support.dense.sequences import make_state, with_embeds
from tests.support.dense.without_cuda import EagerGraphs, FakeChannel, TorchWithoutCuda
from tests.support.plans import plan_of

VOCAB_SIZE, MAX_NUM_SEQS = 64, 4
CHANNEL: Any = FakeChannel()
FEATURE = PromptEmbedsFeature(Mock())
# The model counts: after the vector x comes token x + 1, as after token x.
TABLE = LoadedEmbeds("aa", VOCAB_SIZE, torch.tensor([[20.0], [30.0], [40.0]]))


class Counting:
    """A `DenseBackend` of one layer: after token t, or the vector t, comes t + 1. Records its steps."""

    takes_input_embeds = captures_embeds = True
    always_ends = False

    def __init__(self) -> None:
        self.steps: list[tuple[list[float], bool]] = []  # the residual, and whether vectors were given

    def begin_step(self, plan: StepPlan, num_tokens: int, num_sampled: int = 0, embeds: object = None) -> None: ...

    def first(
        self, token_ids: torch.Tensor, qkv: torch.Tensor, input_embeds: GivenEmbeds | None = None
    ) -> torch.Tensor:
        assert int(token_ids.max()) < VOCAB_SIZE, "a model has no embedding for more"
        residual = token_ids[:, None].float()
        if input_embeds is not None:
            input_embeds.put_into(residual)
        self.steps.append((residual[:, 0].tolist(), input_embeds is not None))
        return residual

    def last(
        self, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor, hidden_out: object = None
    ) -> torch.Tensor:
        following = (residual[rows, 0].long() + 1) % VOCAB_SIZE
        return torch.nn.functional.one_hot(following, VOCAB_SIZE).float()


@pytest.fixture(params=["cpu", "cuda", "captured"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    backend: Any = Counting()
    sampler = Sampler(MAX_NUM_SEQS, VOCAB_SIZE, "cpu")
    if request.param == "cpu":
        runner = ModelRunner(backend, sampler, 1, MAX_NUM_SEQS, [FEATURE])
    else:
        monkeypatch.setattr(FEATURE, "gives_vectors", request.param == "captured")
        monkeypatch.setattr(cuda_model_runner, "torch", TorchWithoutCuda())
        monkeypatch.setattr(cuda_model_runner, "StepGraphs", CountingGraphs)
        monkeypatch.setattr(InputEmbeds, "upload", lambda self, device: self)  # pinned memory needs a GPU
        sizes = {"num_layers": 1, "num_middle_kinds": 1, "qkv_size": 1, "attn_size": 1, "embedding_size": 1}
        config: Any = SimpleNamespace(vocab_size=VOCAB_SIZE, **sizes)
        runner = CudaModelRunner(
            backend, sampler, config, torch.float32, MAX_NUM_SEQS, 32, captures_lazily=True, features=[FEATURE]
        )
    CountingGraphs.num_replays = 0
    runner.attach([CHANNEL])
    return runner


class CountingGraphs(EagerGraphs):
    num_replays = 0
    has_no_memory = False

    def find(self, size: Any) -> SimpleNamespace:
        if CountingGraphs.has_no_memory and size.has_vectors:
            raise CapacityError("no memory left")
        CountingGraphs.num_replays += 1
        return super().find(size)


def open_sequence(runner: ModelRunner, seq_id: int, *token_ids: int, table: LoadedEmbeds | None = None) -> None:
    sampling = SamplingParams(temperature=0.0)
    features = () if table is None else (with_embeds(table, len(token_ids)),)
    runner.open(make_state(seq_id, token_ids, len(token_ids), sampling, features=features))


def run(
    runner: ModelRunner,
    *entries: PlanEntry,
    forks: tuple[Fork, ...] = (),
    forced: tuple[tuple[int, int], ...] = (),
) -> list[list[int]]:
    plan = plan_of(1, *entries, forks=forks, forced=forced)
    return runner.launch(plan, CHANNEL).collect().token_ids.rows()


def steps_of(runner: ModelRunner) -> list[tuple[list[float], bool]]:
    backend: Any = runner._backend
    return [(residual, is_given) for residual, is_given in backend.steps]


def test_vectors_take_their_rows_in_chunks_and_beside_others(runner: ModelRunner) -> None:
    open_sequence(runner, 1, 5, 6)
    open_sequence(runner, 2, VOCAB_SIZE + 2, 7, VOCAB_SIZE, VOCAB_SIZE + 1, table=TABLE)
    assert run(runner, PlanEntry(1, 0, 2, 1), PlanEntry(2, 0, 3, 0)) == [[7], []]
    assert run(runner, PlanEntry(1, 2, 1, 1), PlanEntry(2, 3, 1, 1)) == [[8], [31]]
    assert run(runner, PlanEntry(1, 3, 1, 1), PlanEntry(2, 4, 1, 1)) == [[9], [32]]
    first, second, third = steps_of(runner)
    assert first[0][:5] == [5, 6, 40, 7, 20] and second[0][:2] == [7, 30], "padding comes behind"
    assert not any(second[0][2:]), "nothing is left of the vectors before"
    assert third[0][:2] == [8, 31], "outputs are tokens"
    assert [is_given for _, is_given in (first, second, third)] == [True, True, False]
    if isinstance(runner, CudaModelRunner):
        assert CountingGraphs.num_replays == (3 if FEATURE.gives_vectors else 1)


@pytest.mark.parametrize("runner", ["captured"], indirect=True)
def test_without_memory_for_their_graphs_such_steps_run_without(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CountingGraphs, "has_no_memory", True)
    open_sequence(runner, 1, 7, VOCAB_SIZE, VOCAB_SIZE + 1, table=TABLE)
    assert run(runner, PlanEntry(1, 0, 2, 0)) == [[]] and run(runner, PlanEntry(1, 2, 1, 1)) == [[31]]
    assert CountingGraphs.num_replays == 0 and steps_of(runner) == [([7, 20], True), ([30], True)]
    assert run(runner, PlanEntry(1, 3, 1, 1)) == [[32]] and CountingGraphs.num_replays == 1, "others have graphs"


def test_padding_changes_no_flag_for_which_the_attention_worker_waits() -> None:
    for num_tokens in range(1, 300):
        num_rows = rows_with_vectors(num_tokens)
        assert num_tokens <= num_rows and qkv_flag(num_rows) == qkv_flag(num_tokens)


def test_a_fork_has_the_vectors_of_its_parent(runner: ModelRunner) -> None:
    open_sequence(runner, 1, VOCAB_SIZE, VOCAB_SIZE + 1, table=TABLE)
    assert run(runner, PlanEntry(1, 0, 1, 0)) == [[]]
    entries = PlanEntry(1, 1, 1, 1), PlanEntry(2, 1, 1, 1)
    assert run(runner, *entries, forks=(Fork(1, 2, 1),), forced=((2, VOCAB_SIZE + 2),)) == [[31], [41]]


def test_a_resumed_sequence_begins_with_its_vectors_again(runner: ModelRunner) -> None:
    """As after a kill or a preemption: the prompt, and the tokens so far."""
    sampling = SamplingParams(temperature=0.0, repetition_penalty=1.5)
    runner.open(make_state(1, (VOCAB_SIZE + 1, 31), 1, sampling, features=[with_embeds(TABLE, 1)]))
    assert run(runner, PlanEntry(1, 0, 2, 1)) == [[32]]
    assert steps_of(runner)[0][0][:2] == [30, 31]
