"""Steps that verify what an EAGLE-3 head drafts: their tokens are those of transformers, however good it is.

The steps are planned as the engine plans them: prompts in parts, ahead of the tokens before, or with drafts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from services.common.model_config import ModelConfig, load_model_config
from services.common.sampling_params import SamplingParams
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.features.drafting.device_drafter import DraftRequest
from services.dense_worker.features.drafting.eagle.device_eagle import DeviceEagle
from services.dense_worker.features.drafting.eagle.eagle_model import EagleModel
from services.dense_worker.features.drafting.eagle.load_eagle import StoredHead
from services.dense_worker.model.weights import load_weights
from services.dense_worker.runner.model_runner import ModelRunner
from services.dense_worker.runner.step_hook import StepHook
from services.dense_worker.sampling.sampler import Sampler
from services.step import Fork, PlanEntries, PlanEntry, StepPlan, StepResult
from tests.support.dense.drafting_runners import MAX_NUM_SEQS, MAX_NUM_TOKENS
from tests.support.dense.eagle_head import config_of, random_head, write_head
from tests.support.dense.sequences import make_state
from tests.support.models import make_model_dir
from tests.unit.dense_worker.features.drafting.draft_model.test_device_draft_model import CPU, GREEDY, continued
from tests.unit.dense_worker.model.test_segments import HuggingFaceAttention, load_truth

VOCAB, NUM_TOKENS = 160, 3
DRAWN = SamplingParams(temperature=0.8, seed=11)
HEAD = random_head(64, VOCAB, layers=(2, 0, 1), draft_vocab_size=120)


class StoredRows:
    """A `Channel` whose other end keeps the rows of each sequence, and attends to all of them."""

    def __init__(self, model: PreTrainedModel, config: ModelConfig) -> None:
        self._attention = HuggingFaceAttention(model, config)
        self.qkv = torch.zeros(MAX_NUM_TOKENS, config.qkv_size)
        self.attn_out = torch.zeros(MAX_NUM_TOKENS, config.attn_size)
        self._num_layers = config.num_layers
        self._layer = 0
        self.planned: deque[tuple[PlanEntry, ...]] = deque()  # entries of the steps that have not run
        self.rows: dict[tuple[int, int], torch.Tensor] = {}  # by layer and seq_id

    def begin_step(self, step_id: int, num_rows: int) -> None: ...
    def begin_layers(self, num_rows: int) -> None: ...
    def signal(self, flag: int) -> None: ...
    def check(self) -> None: ...

    def wait(self, flag: int) -> None:
        first = 0
        for entry in self.planned[0]:
            end = first + entry.num_tokens
            before = self.rows.get((self._layer, entry.seq_id), self.qkv[:0])[: entry.position]
            assert len(before) == entry.position, "no token is left out"
            rows = self.rows[self._layer, entry.seq_id] = torch.cat((before, self.qkv[first:end]))
            self.attn_out[first:end] = self._attention(self._layer, rows)[entry.position :]
            first = end
        self._layer = (self._layer + 1) % self._num_layers
        if self._layer == 0:
            self.planned.popleft()

    def fetch_attn_out(self, num_tokens: int) -> torch.Tensor:
        return self.attn_out[:num_tokens]


class Server:
    """A model with a head, and sequences that advance as the test says."""

    def __init__(self, path: Path, make_runner: Any) -> None:
        self.path = make_model_dir(path / "model", "llama", seed=3)
        self.truth = load_truth(self.path)
        config = load_model_config(self.path)
        weights = load_weights(self.path, config, torch.float32, CPU)
        directory = write_head(path / "head", HEAD.tensors, config_of(HEAD, VOCAB))
        loaded = StoredHead.find(directory, config, torch.float32, CPU).load()
        layer = loaded.with_embedding(weights.embedding.table.data)
        sampler = Sampler(MAX_NUM_SEQS, VOCAB, "cpu")
        self.on_device = DeviceEagle(EagleModel(loaded.config, layer, 32, 100), sampler, MAX_NUM_SEQS, MAX_NUM_TOKENS)
        self.channel: Any = StoredRows(self.truth, config)
        self.runner: ModelRunner = make_runner(TorchBackend(weights), config, sampler, self.on_device)
        self.runner.attach([self.channel])
        self.prompts: dict[int, tuple[list[int], SamplingParams]] = {}
        self.texts: dict[int, list[int]] = {}
        self._num_steps = 0
        self.request: DraftRequest | None = None  # the newest one

    def open(self, seq_id: int, prompt: list[int], sampling: SamplingParams = GREEDY) -> None:
        self.prompts[seq_id], self.texts[seq_id] = (prompt, sampling), list(prompt)
        self.runner.open(make_state(seq_id, tuple(prompt), len(prompt), sampling))

    def launch(self, *entries: PlanEntry, num_drafts: int = 0, **options: Any) -> Any:
        self._num_steps += 1
        if entries:
            self.channel.planned.append(entries)
        running = self.runner.launch(StepPlan(self._num_steps, PlanEntries.of(entries), **options), self.channel)
        if num_drafts:
            self.ask(running, num_drafts)
        return running

    def ask(self, running: Any, num_drafts: int) -> None:
        self.request = DraftRequest(self.on_device, num_drafts)
        running.follow_with(self.request)

    @property
    def drafts(self) -> Mapping[int, Sequence[int]]:
        """What has been drafted after the newest step that was asked."""
        assert self.request is not None
        return self.request.token_ids

    def take(self, running: Any, *seq_ids: int) -> StepResult:
        result: StepResult = running.collect()
        for seq_id, accepted in zip(seq_ids, result.token_ids.rows(), strict=True):
            self.texts[seq_id] += accepted
        return result

    def step(self, *entries: PlanEntry, num_drafts: int = 0, **options: Any) -> StepResult:
        running = self.launch(*entries, num_drafts=num_drafts, **options)
        return self.take(running, *(entry.seq_id for entry in entries))

    def decode(self, seq_id: int, drafts: tuple[int, ...] = ()) -> PlanEntry:
        return PlanEntry(seq_id, len(self.texts[seq_id]) - 1, 1 + len(drafts), 1 + len(drafts), drafts)

    def expected(self, seq_id: int, num_tokens: int = NUM_TOKENS, start: int = 0) -> tuple[int, ...]:
        sampling = self.prompts[seq_id][1]
        options = (start, sampling.temperature, sampling.seed or 0)
        return HEAD.draft(self.truth, self.texts[seq_id], num_tokens, *options)

    def check_texts(self) -> None:
        for seq_id, (prompt, sampling) in self.prompts.items():
            text = self.texts[seq_id]
            assert tuple(text[len(prompt) :]) == continued(self.path, prompt, len(text) - len(prompt), sampling)


@pytest.fixture
def server(tmp_path: Path, make_runner: Any) -> Server:
    return Server(tmp_path, make_runner)


def test_what_is_drafted_becomes_drafts_and_change_no_token(server: Server) -> None:
    server.open(1, [5, 9, 17, 3])
    server.open(2, [101, 4], DRAWN)
    server.open(3, [44, 45, 46])
    entries = [PlanEntry(seq_id, 0, len(text), 1) for seq_id, text in server.texts.items()]
    server.step(*entries, num_drafts=NUM_TOKENS)
    for _ in range(5):
        assert server.drafts == {seq_id: server.expected(seq_id) for seq_id in server.texts}
        drafts = {seq_id: tuple(found) for seq_id, found in server.drafts.items()}
        server.step(*(server.decode(*each) for each in drafts.items()), num_drafts=NUM_TOKENS)
    server.check_texts()
    server.step(close_seq_ids=(1, 2, 3))
    assert server.on_device._blocks.num_free == 31, "the blocks of closed sequences are free"


def test_right_drafts_are_accepted_and_the_head_goes_on_behind_them(server: Server) -> None:
    server.open(1, [5, 9, 17, 3])
    server.open(2, [101, 4], DRAWN)
    server.step(PlanEntry(1, 0, 4, 1), PlanEntry(2, 0, 2, 1))
    for num_right, num_wrong in [(2, 0), (1, 2), (0, 3), (4, 1)]:
        drafts = {}
        for seq_id, text in server.texts.items():
            right = continued(server.path, text, num_right + 1, server.prompts[seq_id][1])
            drafts[seq_id] = (*right[:-1], *([(right[-1] + 1) % VOCAB] * num_wrong))
        result = server.step(*(server.decode(*each) for each in drafts.items()), num_drafts=NUM_TOKENS)
        assert [len(accepted) for accepted in result.token_ids.rows()] == [1 + num_right] * 2
        assert server.drafts == {seq_id: server.expected(seq_id) for seq_id in server.texts}
    server.check_texts()


def test_steps_that_are_planned_ahead_and_prompts_in_parts_are_kept(server: Server) -> None:
    """Nobody asks for drafts before the end. Each step is launched before the one before is collected."""
    prompt = [number % VOCAB for number in range(3, 40)]
    server.open(1, [5, 9, 17, 3])
    server.open(2, prompt, DRAWN)
    running = server.launch(PlanEntry(1, 0, 4, 1), PlanEntry(2, 0, 10, 0))
    for number, (position, num_tokens) in enumerate([(10, 10), (20, 16)]):
        ahead = server.launch(PlanEntry(1, 4 + number, 1, 1), PlanEntry(2, position, num_tokens, 0))
        server.take(running, 1, 2)
        running = ahead
    ahead = server.launch(PlanEntry(2, 36, 1, 1), PlanEntry(1, 6, 1, 1))
    server.take(running, 1, 2)
    last = server.launch(PlanEntry(1, 7, 1, 1), PlanEntry(2, 37, 1, 1), num_drafts=0)
    server.take(ahead, 2, 1)
    server.ask(last, NUM_TOKENS)
    server.take(last, 1, 2)
    assert server.drafts == {1: server.expected(1), 2: server.expected(2)}
    server.check_texts()


def test_a_step_without_sampled_tokens_has_no_drafts(server: Server) -> None:
    server.open(1, [5, 9, 17, 3])
    server.step(PlanEntry(1, 0, 3, 0), num_drafts=NUM_TOKENS)
    assert server.drafts == {}
    server.step(PlanEntry(1, 3, 1, 1), num_drafts=NUM_TOKENS)
    assert server.drafts == {1: server.expected(1)}
    server.step(close_seq_ids=(1,), num_drafts=NUM_TOKENS)
    assert server.drafts == {}


def test_a_cached_prefix_and_a_lost_attachment(server: Server) -> None:
    """The attention worker has keys and values of tokens that this worker never computed: the head begins behind."""
    server.open(1, [5, 9, 17, 3, 20, 21])
    server.step(PlanEntry(1, 0, 6, 1))
    server.open(2, [5, 9, 17, 3, 20, 22])
    for layer in range(3):
        server.channel.rows[layer, 2] = server.channel.rows[layer, 1][:4]
    server.step(PlanEntry(2, 4, 2, 1), server.decode(1), num_drafts=NUM_TOKENS)
    assert server.drafts == {2: server.expected(2, start=4), 1: server.expected(1)}
    server.runner.attach([server.channel])
    server.runner.open(make_state(1, tuple(server.texts[1]), 6, GREEDY))
    server.step(server.decode(1), num_drafts=NUM_TOKENS)
    assert server.drafts == {1: server.expected(1, start=len(server.texts[1]) - 2)}
    server.check_texts()


def test_forks_begin_anew(server: Server) -> None:
    server.open(1, [5, 9, 17, 3])
    server.step(PlanEntry(1, 0, 4, 1))
    server.prompts[2], server.texts[2] = server.prompts[1], server.texts[1][:4]
    for layer in range(3):
        server.channel.rows[layer, 2] = server.channel.rows[layer, 1][:3]
    entries = PlanEntry(2, 3, 1, 1), server.decode(1)
    server.step(*entries, num_drafts=NUM_TOKENS, forks=(Fork(1, 2, 4),))
    assert server.drafts == {2: server.expected(2, start=3), 1: server.expected(1)}
    server.check_texts()


def test_a_preempted_sequence_is_computed_again(server: Server) -> None:
    server.open(1, [5, 9, 17, 3])
    server.step(PlanEntry(1, 0, 4, 1))
    for _ in range(4):
        server.step(server.decode(1))
    server.step(PlanEntry(1, 2, 3, 0))
    server.step(PlanEntry(1, 5, 4, 1), num_drafts=NUM_TOKENS)
    assert server.drafts == {1: server.expected(1)}
    server.check_texts()


def test_without_a_head_steps_copy_no_residuals(tmp_path: Path, make_runner: Any, monkeypatch: Any) -> None:
    server = Server(tmp_path, make_runner)
    kept = server.on_device.residuals_out().memory
    server.open(1, [5, 9, 17, 3])
    server.runner._hook = StepHook()
    server.step(PlanEntry(1, 0, 4, 1))
    assert not kept.any()
