"""Steps that verify what a draft model drafts: their tokens are those of transformers, however good it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.model_config import load_model_config
from services.common.sampling_params import SamplingParams
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.features.drafting.device_drafter import DraftRequest
from services.dense_worker.features.drafting.draft_model.device_draft_model import DeviceDraftModel
from services.dense_worker.features.drafting.draft_model.model import DraftModel
from services.dense_worker.model.weights import load_weights
from services.dense_worker.runner.model_runner import ModelRunner
from services.dense_worker.sampling.sampler import Sampler
from services.step import PlanEntry, StepPlan, StepResult
from tests.support.dense.drafting_runners import MAX_NUM_SEQS
from tests.support.dense.sequences import make_state
from tests.support.models import make_model_dir
from tests.support.plans import plan_of
from tests.unit.dense_worker.features.drafting.draft_model.test_device_draft_model import CPU, GREEDY, continued
from tests.unit.dense_worker.features.drafting.medusa.test_device_heads import WholeSequences
from tests.unit.dense_worker.model.test_segments import load_truth

DRAWN = SamplingParams(temperature=0.8, seed=11)
PROMPTS = {1: ([5, 9, 17, 3], GREEDY), 2: ([101, 4], DRAWN), 3: ([44, 45, 46], GREEDY)}
NUM_TOKENS, NUM_STEPS = 3, 5


@pytest.mark.parametrize("is_same", [True, False], ids=["the same model", "a random model"])
def test_tokens_are_those_of_transformers(tmp_path: Path, make_runner: Any, is_same: bool) -> None:
    path = make_model_dir(tmp_path / "model", "llama", seed=3)
    draft_path = path if is_same else make_model_dir(tmp_path / "draft", "qwen2", seed=8, num_hidden_layers=1)
    config, draft_config = load_model_config(path), load_model_config(draft_path)
    sampler = Sampler(MAX_NUM_SEQS, config.vocab_size, "cpu")
    draft = DraftModel(load_weights(draft_path, draft_config, torch.float32, CPU), draft_config, 16, 100)
    on_device = DeviceDraftModel(draft, sampler, MAX_NUM_SEQS)
    channel: Any = WholeSequences(load_truth(path), config)
    backend = TorchBackend(load_weights(path, config, torch.float32, CPU))
    runner: ModelRunner = make_runner(backend, config, sampler, on_device)
    runner.attach([channel])
    texts = {seq_id: list(prompt) for seq_id, (prompt, _) in PROMPTS.items()}
    for seq_id, (prompt, sampling) in PROMPTS.items():
        runner.open(make_state(seq_id, tuple(prompt), len(prompt), sampling))
    proposed: dict[int, tuple[int, ...]] = dict.fromkeys(PROMPTS, ())
    num_accepted = num_drafts = 0
    for number in range(1, 1 + NUM_STEPS):
        entries = [
            PlanEntry(seq_id, 0, len(text) + len(proposed[seq_id]), 1 + len(proposed[seq_id]), proposed[seq_id])
            for seq_id, text in texts.items()
        ]
        channel.lengths = [entry.num_tokens for entry in entries]
        running = runner.launch(plan_of(number, *entries), channel)
        request = DraftRequest(on_device, NUM_TOKENS)
        running.follow_with(request)
        result: StepResult = running.collect()
        for text, accepted, entry in zip(texts.values(), result.token_ids.rows(), entries, strict=True):
            text += accepted
            num_accepted += len(accepted) - 1
            num_drafts += len(entry.draft_token_ids)
        proposed = {seq_id: tuple(found) for seq_id, found in request.token_ids.items()}
        assert set(map(len, proposed.values())) == {NUM_TOKENS} and len(proposed) == len(PROMPTS)
    for seq_id, (prompt, sampling) in PROMPTS.items():
        text = texts[seq_id]
        assert tuple(text[len(prompt) :]) == continued(path, prompt, len(text) - len(prompt), sampling)
    assert num_drafts == len(PROMPTS) * NUM_TOKENS * (NUM_STEPS - 1)
    assert num_accepted == num_drafts if is_same else num_accepted < 0.2 * num_drafts
    plan = StepPlan(NUM_STEPS + 1, close_seq_ids=tuple(PROMPTS))
    runner.launch(plan, channel).collect()
    assert on_device._blocks.num_free == 15, "the blocks of closed sequences are free"
