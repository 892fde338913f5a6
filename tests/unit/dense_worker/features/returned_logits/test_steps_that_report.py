"""What steps report of prompts: compared with the logits of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.model_config import load_model_config
from services.common.sampling_params import SamplingParams
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.model.weights import load_weights
from services.dense_worker.runner.batch_rows import RequestState
from services.dense_worker.runner.model_runner import ModelRunner
from services.dense_worker.sampling.sampler import Sampler
from services.step import PlanEntry
from tests.support.dense.sequences import REPORTING, make_state
from tests.support.models import make_model_dir
from tests.support.plans import plan_of
from tests.support.reports import prompt_logprobs, read_prompt_logprobs
from tests.unit.dense_worker.features.drafting.medusa.test_device_heads import CPU, WholeSequences
from tests.unit.dense_worker.model.test_segments import load_truth

NAMED = (7, 150)


def test_log_probabilities_of_a_prompt_are_those_of_transformers(tmp_path: Path) -> None:
    """Beside a sequence that reports nothing."""
    path = make_model_dir(tmp_path / "model", "llama", seed=3)
    config, truth = load_model_config(path), load_truth(path)
    backend = TorchBackend(load_weights(path, config, torch.float32, CPU))
    sampler = Sampler(4, config.vocab_size, "cpu")
    runner = ModelRunner(backend, sampler, config.num_layers, 4, REPORTING)
    channel: Any = WholeSequences(truth, config)
    runner.attach([channel])
    prompts = {1: [5, 9, 17, 3], 2: [101, 4]}
    states: dict[int, RequestState] = {}
    for seq_id, prompt in prompts.items():
        asked = (SamplingParams(logprob_token_ids=NAMED), 2) if seq_id == 1 else (None, None)
        states[seq_id] = make_state(seq_id, prompt, len(prompt), asked[0], features=prompt_logprobs(asked[1]))
        runner.open(states[seq_id])
    entries = [PlanEntry(seq_id, 0, len(prompt), 1) for seq_id, prompt in prompts.items()]
    channel.lengths = [entry.num_tokens for entry in entries]
    result = runner.launch(plan_of(1, *entries), channel).collect()
    [report] = result.reports
    assert (report.seq_id, report.feature, report.start) == (1, "prompt_logprobs", 1)
    tokens = read_prompt_logprobs(len(report.rows), report.rows.tobytes())
    with torch.inference_mode():
        expected = truth(torch.tensor([prompts[1]])).logits[0].log_softmax(-1)
    assert len(tokens) == len(prompts[1]) - 1
    for token, row, token_id in zip(tokens, expected, prompts[1][1:], strict=False):
        values, token_ids = row.topk(2)
        assert token.logprob == pytest.approx(row[token_id].item(), abs=1e-4)  # float32 in another order of sums
        assert [top_id for top_id, _ in token.top][:2] == token_ids.tolist()
        assert [logprob for _, logprob in token.top][:2] == pytest.approx(values.tolist(), abs=1e-4)
        assert token.top[2:] == tuple((each, pytest.approx(row[each].item(), abs=1e-4)) for each in NAMED)
    [feature] = states[1].features
    assert {1 + len(token.top) for token in tokens} == {feature.num_values_per_token}
    feature.note_reported(report)
    assert not feature.num_values_per_token, "all of the prompt has been reported"
    assert not states[2].features
