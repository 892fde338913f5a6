"""A draft model on a GPU: it drafts as on a CPU, and the answers are those without it, also over a kill."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.common.config import EMBEDDED_MODEL
from services.common.sampling_params import SamplingParams
from tests.gpu.gpu_cluster import gpu_cluster
from tests.support.clients.streams import collect_all
from tests.support.cluster import Cluster, request
from tests.support.dense.idle_layers import deeper_model
from tests.support.models import make_model_dir
from tests.unit.dense_worker.features.drafting.draft_model.test_device_draft_model import (
    MAX_NUM_SEQS,
    NUM_TOKENS,
    DraftedSteps,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

MAX_TOKENS = 200
# In float32 the tokens do not depend on the size of a step.
MESSAGES = [
    request(prompt, MAX_TOKENS, ignore_eos=True, temperature=temperature, seed=7)
    for prompt in ("San Francisco is a", "The cat and the dog")
    for temperature in (0.0, 1.0)
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
    return make_model_dir(tmp_path_factory.mktemp("draft"), "llama", seed=5, **sizes)


@pytest.fixture
def drafting(path: Path) -> Iterator[DraftedSteps]:
    """As the runner makes it: its passes for one sequence are captured graphs."""
    drafting = DraftedSteps(path, device=torch.device("cuda"))
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        drafting.on_device.warm_up()
        torch.cuda.synchronize()
        yield drafting


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_are_those_of_transformers(drafting: DraftedSteps, temperature: float) -> None:
    """Alone, by graphs, and together, without them; after right and wrong drafts, and beyond a few blocks."""
    sequences = [
        drafting.open([(number * 7 + length) % 160 for number in range(length)], SamplingParams(temperature, seed=3))
        for length in (4, 60, 150)
    ]
    for added in [([7], []), ([7, 8], [9]), ([1, 2, 3, 4], [5, 5, 5]), ([6], [6]), ([1] * 9, [])]:
        for sequence in sequences:
            drafts = drafting.step({sequence: added})
            assert len(drafts[sequence.seq_id]) == NUM_TOKENS
            drafting.check(drafts, [sequence])
        drafts = drafting.step({sequence: added for sequence in sequences})
        assert len(drafts) == len(sequences) < MAX_NUM_SEQS
        drafting.check(drafts, sequences)


def test_a_draft_waits_for_no_device(drafting: DraftedSteps) -> None:
    """While the GPU is busy, drafts are enqueued behind its work."""
    first, second = drafting.open([5, 9, 17, 3]), drafting.open([1] * 90)
    for sequences in ([first], [first, second]) * 2:  # the first ones allocate memory
        drafting.step({sequence: ([7], []) for sequence in sequences})
    for sequences in ([first], [first, second]):
        torch.cuda._sleep(2_000_000_000)  # clock cycles: about a second
        busy = torch.cuda.Event()
        busy.record()
        drafting.enqueue({sequence: ([7], []) for sequence in sequences})
        assert not busy.query()


def token_ids(cluster: Cluster, *, kills: bool = False) -> list[dict[int, list[int]]]:
    def kill() -> None:
        os.kill(cluster.pid_of("dense_worker"), signal.SIGKILL)

    return [dict(each.token_ids) for each in collect_all(cluster.gateway, MESSAGES, *((kill,) if kills else ()))]


def test_answers_are_those_without_a_draft_model(tmp_path: Path) -> None:
    """The served model is six times as deep as the draft model and says the same, so that drafts are right and pay."""
    for name in ("off", "on"):
        (tmp_path / name).mkdir()
    served = "model.dtype=float32", f"model.path={deeper_model(tmp_path / 'model', 24)}"
    with gpu_cluster(tmp_path / "off", *served) as cluster:
        expected = token_ids(cluster)
    step_log = tmp_path / "steps"
    settings = "scheduler.speculation=draft_model", f"scheduler.draft_model={EMBEDDED_MODEL}"
    with gpu_cluster(tmp_path / "on", *served, *settings, f"dense.step_log={step_log}") as cluster:
        for number in (0, 1, 0, 1, 0):
            alone = collect_all(cluster.gateway, [MESSAGES[number]])
            assert [dict(each.token_ids) for each in alone] == [expected[number]]
        assert [token_ids(cluster) for _ in range(2)] == [expected] * 2
        assert token_ids(cluster, kills=True) == expected
    steps = [json.loads(line) for line in step_log.read_text().splitlines()]
    assert any(step["num_sampled"] > step["num_seqs"] > 0 for step in steps), "no step has verified drafts"
    assert any(step.get("draft_ms", 0.0) > 0.0 for step in steps)
