"""What heads draft: compared with transformers' last hidden states, and with steps that run one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from services.common.model_config import ModelConfig, load_model_config
from services.common.sampling_params import SamplingParams
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.features.drafting.device_drafter import DraftRequest, last_rows
from services.dense_worker.features.drafting.medusa.heads import DeviceHeads, MedusaHeads
from services.dense_worker.features.drafting.medusa.load_heads import StoredHeads
from services.dense_worker.model.weights import load_weights
from services.dense_worker.runner.cuda_model_runner import CudaModelRunner
from services.dense_worker.runner.model_runner import ModelRunner
from services.dense_worker.runner.step_tokens import verify
from services.dense_worker.sampling.sampler import Sampler
from services.step import PlanEntry, StepPlan, StepResult
from tests.support.dense.drafting_runners import MAX_NUM_SEQS, MAX_NUM_TOKENS, cpu_runner
from tests.support.dense.medusa_heads import in_layout_of_medusa, random_heads, write_heads
from tests.support.dense.sequences import make_state
from tests.support.models import make_model_dir
from tests.support.plans import plan_of
from tests.unit.dense_worker.model.test_segments import HuggingFaceAttention, load_truth

torch.set_num_threads(1)
CPU = torch.device("cpu")
NUM_HEADS = 3
HEADS = random_heads(NUM_HEADS, 64, 160)
PROMPTS = {1: [5, 9, 17, 3], 2: [101, 4], 3: [44, 45, 46, 47, 48, 49]}


class WholeSequences:
    """A `Channel` whose other end attends to all tokens of each sequence, which every step has."""

    def __init__(self, model: PreTrainedModel, config: ModelConfig) -> None:
        self._attention = HuggingFaceAttention(model, config)
        self.qkv = torch.zeros(MAX_NUM_TOKENS, config.qkv_size)
        self.attn_out = torch.zeros(MAX_NUM_TOKENS, config.attn_size)
        self._num_layers = config.num_layers
        self._layer = 0
        self.lengths: list[int] = []

    def begin_step(self, step_id: int, num_rows: int) -> None: ...
    def begin_layers(self, num_rows: int) -> None: ...
    def signal(self, flag: int) -> None: ...
    def check(self) -> None: ...

    def wait(self, flag: int) -> None:
        qkv, out = (tensor[: sum(self.lengths)].split(self.lengths) for tensor in (self.qkv, self.attn_out))
        for some_qkv, some_out in zip(qkv, out, strict=True):
            some_out.copy_(self._attention(self._layer, some_qkv))
        self._layer = (self._layer + 1) % self._num_layers

    def fetch_attn_out(self, num_tokens: int) -> torch.Tensor:
        return self.attn_out[:num_tokens]


class Steps:
    """A model with heads, and steps of whole sequences."""

    def __init__(self, path: Path, family: str, make_runner: Any) -> None:
        make_model_dir(path / "model", family, seed=3)
        self.model = load_truth(path / "model")
        config = load_model_config(path / "model")
        backend = TorchBackend(load_weights(path / "model", config, torch.float32, CPU))
        config_of_heads = {"medusa_num_heads": NUM_HEADS, "medusa_num_layers": 1}
        directory = write_heads(path / "heads", in_layout_of_medusa(HEADS), **config_of_heads)
        heads = StoredHeads.find(directory, config, torch.float32, CPU, 64).load()
        self._channel: Any = WholeSequences(self.model, config)
        self.on_device = DeviceHeads(heads, MAX_NUM_SEQS)
        sampler = Sampler(MAX_NUM_SEQS, config.vocab_size, "cpu")
        self.runner: ModelRunner = make_runner(backend, config, sampler, self.on_device)
        self.runner.attach([self._channel])
        self.num_steps = 0
        for seq_id, prompt in PROMPTS.items():
            new = make_state(seq_id, tuple(prompt), len(prompt), SamplingParams(temperature=0.0))
            self.runner.open(new)

    def launch(self, texts: dict[int, list[int]], drafts: dict[int, list[int]]) -> Any:
        self.num_steps += 1
        entries = [
            PlanEntry(seq_id, 0, len(text) + len(drafts[seq_id]), 1 + len(drafts[seq_id]), tuple(drafts[seq_id]))
            for seq_id, text in texts.items()
        ]
        self._channel.lengths = [entry.num_tokens for entry in entries]
        return self.runner.launch(plan_of(self.num_steps, *entries), self._channel)

    def ask(self, running: Any) -> DraftRequest:
        """Asks for drafts after a step."""
        request = DraftRequest(self.on_device, NUM_HEADS)
        running.follow_with(request)
        return request

    @torch.inference_mode()
    def greedy(self, text: list[int], num_tokens: int) -> list[int]:
        found = list(text)
        for _ in range(num_tokens):
            found.append(int(self.model(torch.tensor([found])).logits[0, -1].argmax()))
        return found[len(text) :]

    @torch.inference_mode()
    def expected_drafts(self, text: list[int]) -> tuple[int, ...]:
        """After all tokens but the last one, the model has sampled that; the heads draft what follows it."""
        hidden = self.model.model(torch.tensor([text[:-1]])).last_hidden_state[0, -1]
        return tuple(head.draft(hidden) for head in HEADS)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_drafts_are_those_of_the_formula_on_the_hidden_states_of_transformers(
    tmp_path: Path, family: str, make_runner: Any
) -> None:
    """Steps of several sequences, with right drafts, wrong ones, and ones that are right at first."""
    steps = Steps(tmp_path, family, make_runner)
    texts = {seq_id: list(prompt) for seq_id, prompt in PROMPTS.items()}
    for num_right, num_wrong in [({1: 0, 2: 0, 3: 0}, 0), ({1: 2, 2: 0, 3: 1}, 1), ({1: 0, 2: 3, 3: 1}, 0)]:
        drafts = {}
        for seq_id, text in texts.items():
            right = steps.greedy(text, num_right[seq_id] + 1)
            drafts[seq_id] = [*right[:-1], *([(right[-1] + 1) % 160] * num_wrong)]
        running = steps.launch(texts, drafts)
        request = steps.ask(running)
        result: StepResult = running.collect()
        for (seq_id, text), accepted in zip(texts.items(), result.token_ids.rows(), strict=True):
            assert len(accepted) == 1 + num_right[seq_id]
            text += accepted
        assert request.token_ids == {seq_id: steps.expected_drafts(text) for seq_id, text in texts.items()}


def test_heads_do_not_run_after_a_step_that_nobody_asks(
    tmp_path: Path, make_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(tmp_path, "llama", make_runner)
    texts, num_runs = {seq_id: list(prompt) for seq_id, prompt in PROMPTS.items()}, []
    monkeypatch.setattr(MedusaHeads, "draft", lambda *_: num_runs.append(1))
    result = steps.launch(texts, {seq_id: [] for seq_id in texts}).collect()
    assert len(result.token_ids.token_ids) == len(texts) and not num_runs and result.follow_up_s == 0.0


def test_the_next_step_may_be_launched_before_the_drafts_are_read(tmp_path: Path, make_runner: Any) -> None:
    """On a GPU the next step overwrites the hidden states."""
    steps = Steps(tmp_path, "llama", make_runner)
    texts = {1: list(PROMPTS[1])}
    running = steps.launch(texts, {1: []})
    request = steps.ask(running)
    if isinstance(steps.runner, CudaModelRunner):
        other = steps.launch({3: PROMPTS[3]}, {3: []})
        result = running.collect()
        other.collect()
    else:
        result = running.collect()
    texts[1] += result.token_ids.rows()[0]
    assert request.token_ids == {1: steps.expected_drafts(texts[1])}


def test_heads_may_be_asked_for_when_most_of_a_step_has_run(tmp_path: Path) -> None:
    """As in a long step on a CPU, near whose end the next plan is decided."""
    steps = Steps(tmp_path, "llama", cpu_runner)
    text = list(PROMPTS[1])
    running = steps.launch({1: text}, {1: []})
    running.run_most()
    request = steps.ask(running)
    text += running.collect().token_ids.rows()[0]
    assert request.token_ids == {1: steps.expected_drafts(text)}


def test_a_step_without_sampled_tokens_has_no_drafts(tmp_path: Path, make_runner: Any) -> None:
    steps = Steps(tmp_path, "llama", make_runner)
    steps._channel.lengths = [3]
    running = steps.runner.launch(plan_of(1, PlanEntry(1, 0, 3, 0)), steps._channel)
    request = steps.ask(running)
    running.collect()
    assert request.token_ids == {}
    closing = steps.runner.launch(StepPlan(2, close_seq_ids=(1,)), steps._channel)
    request = steps.ask(closing)
    closing.collect()
    assert request.token_ids == {}


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=6), st.data())
def test_the_last_row_is_that_of_the_last_token_that_counts(drafts: list[list[int]], data: st.DataObject) -> None:
    entries: Sequence[Any] = [SimpleNamespace(num_logits=len(each) + 1, draft_token_ids=each) for each in drafts]
    sampled = [[data.draw(st.integers(0, 2)) for _ in range(entry.num_logits)] for entry in entries]
    expected, first = [], 0
    for each, tokens in zip(drafts, sampled, strict=True):
        expected.append(first + len(verify(each, tokens)) - 1)
        first += len(tokens)
    assert last_rows(entries, torch.tensor([token for tokens in sampled for token in tokens])).tolist() == expected
