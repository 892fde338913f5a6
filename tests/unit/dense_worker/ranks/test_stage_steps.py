"""Steps of two stages as on GPUs, by both runners and the fused operations: the tokens of Hugging Face.

CUDA is replaced: what is enqueued runs at once, and so does attention when it is signalled.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from services.common.model_config import load_model_config
from services.common.rank import seam_config
from services.common.sampling_params import SamplingParams
from services.dense_worker.kernels.linear.linear_choice import LinearChoice, LinearKernel
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.ranks import cuda_shard_runner
from services.dense_worker.ranks.leading_backend import LeadingRanks
from services.dense_worker.ranks.leading_stage import LeadingStage
from services.dense_worker.ranks.stage_links import StageLinks
from services.dense_worker.ranks.stage_weights import linked_weights
from services.dense_worker.runner import cuda_model_runner
from services.dense_worker.runner.lane_runners import LaneRunners
from services.dense_worker.sampling.sampler import Sampler
from services.pb import shard_pb2
from services.step import PlanEntry, StepPlan
from services.step.codec import decode_plan
from tests.support.dense.fake_triton_kernels import fake_triton_kernels
from tests.support.dense.sequences import make_state
from tests.support.dense.thread_ranks import ThreadGroup, new_sent, run_ranks
from tests.support.dense.whole_model import WholeModel
from tests.support.dense.without_cuda import EagerGraphs, FakeChannel, TorchWithoutCuda
from tests.support.models import make_model_dir
from tests.support.plans import plan_of
from tests.support.reference import reference_tokens

CPU = torch.device("cpu")
MAX_NUM_SEQS, MAX_NUM_TOKENS, NUM_TOKENS = 4, 32, 6
PROMPTS = {1: [5, 9, 17, 3, 44, 21, 8, 30, 12], 2: [61, 4, 7]}


class WarmedGraphs(EagerGraphs):
    """`StepGraphs` that captures nothing, but warms up."""

    def __init__(
        self, stream: object, warm_up: Callable[[Any], None], run: Callable[[Any], None], *, undisturbed: object
    ) -> None:
        super().__init__(stream, warm_up, run)
        self._warm_up = warm_up

    def capture_all(self, sizes: Iterable[Any]) -> None:
        for size in sizes:
            self.capture(size)

    def capture(self, size: Any) -> None:
        self._warm_up(size)


class StageChannel(FakeChannel):
    """The attention of a stage's layers, which acts when it is signalled."""

    def __init__(self, model: WholeModel) -> None:
        self._model = model
        self.qkv = torch.zeros(MAX_NUM_TOKENS, model.config.qkv_size)
        self.attn_out = torch.zeros(MAX_NUM_TOKENS, model.config.attn_size)
        self._layer = self._num_tokens = 0

    def plan(self, plan: StepPlan) -> None:
        self._layer, self._num_tokens = 0, plan.num_tokens
        self._model.attention.begin_step(self._model.cache.plan_step(plan).metadata)
        self._model.cache.commit_step()

    def signal(self, flag: int) -> None:
        rows = slice(self._num_tokens)
        self._model.attention.forward(self._layer, self.qkv[rows], self.attn_out[rows])
        self._layer += 1

    def fetch_attn_out(self, num_tokens: int) -> torch.Tensor:
        return self.attn_out[:num_tokens]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in (cuda_model_runner, cuda_shard_runner):
        monkeypatch.setattr(module, "torch", TorchWithoutCuda())
        monkeypatch.setattr(module, "StepGraphs", WarmedGraphs)
    monkeypatch.setattr(cuda_shard_runner, "upload", lambda array, device: torch.from_numpy(array))
    monkeypatch.setattr(LinearChoice, "measure", lambda self, linears, *_: self.set_all(linears, LinearKernel.STREAMED))
    return make_model_dir(tmp_path / "model", "llama", num_hidden_layers=5, vocab_size=96)


@pytest.mark.parametrize("num_lanes", [1, 2])
def test_tokens_are_those_of_hugging_face(path: Path, num_lanes: int) -> None:
    """With two lanes each sequence is in one of its own."""
    commands: queue.Queue[shard_pb2.ShardCommand | None] = queue.Queue()
    sent = [new_sent(2) for _ in range(num_lanes)]

    def run(group: ThreadGroup) -> dict[int, list[int]]:
        return run_stage(path, commands, [group.of_lane(each) for each in sent])

    with fake_triton_kernels():
        tokens, _ = run_ranks(2, run, are_stages=True)
    assert tokens == {seq_id: reference_tokens(path, prompt, NUM_TOKENS) for seq_id, prompt in PROMPTS.items()}
    assert not any(each.qsize() for of_lane in sent for each in of_lane.values()), "all that was sent was received"


def run_stage(
    path: Path, commands: queue.Queue[shard_pb2.ShardCommand | None], groups: Sequence[ThreadGroup]
) -> dict[int, list[int]]:
    """`groups`: by lane"""
    from services.dense_worker.backends.cuda_backend import CudaBackend
    from services.dense_worker.backends.cuda_operations import CudaOperations

    config, rank = load_model_config(path), groups[0].rank
    sizes, is_last = seam_config(config, rank), rank.index == 1

    def make(weights: ModelWeights, links: StageLinks) -> tuple[CudaBackend, StageLinks]:
        operations = CudaOperations(sizes, MAX_NUM_TOKENS, torch.float32, CPU)
        linked = linked_weights(weights, links)
        return CudaBackend(linked, sizes, MAX_NUM_TOKENS, operations=operations), links

    # One step after the other: so all lanes have one attention backend.
    model: Any = WholeModel(path, lambda weights: make(weights, StageLinks(torch.float32))[0], rank=rank)
    for seq_id, prompt in PROMPTS.items():
        model.open(seq_id, prompt)
    channels: dict[int, Any] = {lane: StageChannel(model) for lane in range(len(groups))}
    if is_last:
        backend, links = make(model.weights, StageLinks(torch.float32))
        runner = cuda_shard_runner.CudaShardRunner(backend, links, sizes.num_layers, MAX_NUM_TOKENS, CPU)
        runner.attach(channels, groups)
        while (command := commands.get(timeout=20.0)) is not None:
            plan = decode_plan(command.step.plan)
            if len(plan.entries):
                channels[plan.lane].plan(plan)
            runner.run_step(plan, command.step.num_rows, command.step.num_sampled)
        return {}
    runners = []
    for _ in groups:
        leading = LeadingStage(*make(model.weights, StageLinks(torch.float32)), config.vocab_size)
        sampler = Sampler(MAX_NUM_SEQS, config.vocab_size, "cpu")
        runner = cuda_model_runner.CudaModelRunner(
            leading, sampler, sizes, torch.float32, MAX_NUM_SEQS, MAX_NUM_TOKENS, captures_lazily=False
        )
        runner.warm_up()  # as a standby does, alone
        runners.append(runner)
    lanes = LaneRunners(runners)
    try:
        lanes.attach(channels.values(), LeadingRanks(groups, commands.put, Mock()))
        return run_steps(lanes, channels)
    finally:
        commands.put(None)


def run_steps(runner: LaneRunners, channels: Mapping[int, Any]) -> dict[int, list[int]]:
    """A part of a prompt without logits, the rest beside another prompt, then tokens; in lanes each by itself."""
    lane_of = {seq_id: seq_id % len(channels) for seq_id in PROMPTS}
    tokens: dict[int, list[int]] = {seq_id: [] for seq_id in PROMPTS}
    for seq_id, prompt in PROMPTS.items():
        sampling = SamplingParams(temperature=0.0)
        runner.open(make_state(seq_id, tuple(prompt), len(prompt), sampling, lane=lane_of[seq_id]))
    lengths = {seq_id: len(prompt) for seq_id, prompt in PROMPTS.items()}
    steps = [[PlanEntry(1, 0, 5, 0)], [PlanEntry(1, 5, 4, 1), PlanEntry(2, 0, 3, 1)]]
    steps += [[PlanEntry(each, lengths[each] + i, 1, 1) for each in PROMPTS] for i in range(NUM_TOKENS - 1)]
    by_lane = [
        (lane, own)
        for entries in steps
        for lane in channels
        if (own := [each for each in entries if lane_of[each.seq_id] == lane])
    ]
    for number, (lane, entries) in enumerate(by_lane, start=1):
        plan, channel = plan_of(number, *entries, lane=lane), channels[lane]
        channel.plan(plan)
        result = runner.launch(plan, channel).collect()
        for entry, found in zip(entries, result.token_ids.rows(), strict=True):
            tokens[entry.seq_id] += found
    return tokens
