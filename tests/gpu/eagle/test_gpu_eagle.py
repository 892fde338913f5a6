"""An EAGLE-3 head on a GPU: it drafts as on a CPU, and the answers are those without it, also over a kill."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.common.sampling_params import SamplingParams
from tests.gpu.gpu_cluster import gpu_cluster
from tests.support.clients.streams import collect_all
from tests.support.cluster import Cluster, free_port, request
from tests.support.dense.eagle_head import head_that_knows
from tests.support.dense.idle_layers import deeper_model
from tests.support.models import make_model_dir
from tests.unit.dense_worker.features.drafting.eagle.test_device_eagle import MAX_NUM_SEQS, NUM_TOKENS, DraftedSteps
from tests.unit.dense_worker.model.test_segments import load_truth

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PROMPT = "San Francisco is a"
NUM_KNOWN, NUM_DRAFTS = 60, 3
# In float32 the tokens do not depend on the size of a step.
MESSAGES = [
    request(prompt, 200, ignore_eos=True, temperature=temperature, seed=7)
    for prompt in (PROMPT, "The cat and the dog")
    for temperature in (0.0, 1.0)
]
KNOWN = request(PROMPT, NUM_KNOWN, ignore_eos=True, temperature=0.0, seed=7)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"), "llama", seed=5)


@pytest.fixture
def drafting(path: Path, tmp_path: Path) -> Iterator[DraftedSteps]:
    drafting = DraftedSteps(path, load_truth(path), tmp_path / "head", device=torch.device("cuda"))
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        drafting.on_device.warm_up()
        torch.cuda.synchronize()
        yield drafting


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_are_those_of_the_formula(drafting: DraftedSteps, temperature: float) -> None:
    """Of one sequence and of several, after right and wrong drafts, behind a cached prefix and beyond a block."""
    starts = {
        drafting.open(
            [(number * 7 + length) % 160 for number in range(length)], SamplingParams(temperature, seed=3)
        ): start
        for length, start in ((4, 0), (60, 10), (100, 0))
    }
    assert len(starts) < MAX_NUM_SEQS
    for sequence, start in starts.items():
        drafting.check(drafting.step({sequence: ([7], [])}, position=start), {sequence: start})
    for added in [([7], []), ([7, 8], [9]), ([1, 2, 3, 4], [5, 5, 5]), ([6], [6])]:
        for sequence, start in starts.items():
            drafting.check(drafting.step({sequence: added}), {sequence: start})
        drafting.check(drafting.step(dict.fromkeys(starts, added)), starts)


def test_neither_keeping_nor_drafting_waits_for_the_device(drafting: DraftedSteps) -> None:
    sequence = drafting.open([5, 9, 17, 3])
    drafting.step({sequence: ([7], [])}, position=0)
    for _ in range(3):  # the first ones allocate memory
        drafting.step({sequence: ([7], [])})
    entry, tokens = drafting.decode(sequence, [7], [])
    sampled = torch.tensor(tokens, device="cuda")
    torch.cuda._sleep(2_000_000_000)  # clock cycles: about a second
    busy = torch.cuda.Event()
    busy.record()
    drafting.on_device.keep([entry], [sequence], sampled)
    drafting.on_device.draft([entry], [sequence], sampled, NUM_TOKENS)
    assert not busy.query()


def token_ids(cluster: Cluster, *, kills: bool = False) -> list[dict[int, list[int]]]:
    def kill() -> None:
        os.kill(cluster.pid_of("dense_worker"), signal.SIGKILL)

    return [dict(each.token_ids) for each in collect_all(cluster.gateway, MESSAGES, *((kill,) if kills else ()))]


def draft_counts(address: str) -> tuple[int, int]:
    """Drafts that steps have verified, and those that were right."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as response:
        text = response.read().decode()
    names = ("num_draft_tokens_total", "num_accepted_tokens_total")
    found = [
        re.search(rf"^twostroke_dense_spec_decode_{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE) for name in names
    ]
    drafts, accepted = (0 if each is None else int(float(each[1])) for each in found)
    return drafts, accepted


def test_answers_are_those_without_a_head(tmp_path: Path) -> None:
    """The head knows the answer to one prompt. The model has idle layers, so that drafts pay."""
    for name in ("off", "on"):
        (tmp_path / name).mkdir()
    served = "model.dtype=float32", f"model.path={deeper_model(tmp_path / 'model', 24)}"
    with gpu_cluster(tmp_path / "off", *served) as cluster:
        expected = token_ids(cluster)
    answer = expected[0][0]
    path = head_that_knows(tmp_path / "head", PROMPT, answer[: NUM_KNOWN + NUM_DRAFTS], NUM_DRAFTS)
    step_log, address = tmp_path / "steps", f"127.0.0.1:{free_port()}"
    settings = (
        "scheduler.speculation=eagle3",
        f"scheduler.speculation_model={path}",
        f"scheduler.num_speculative_tokens={NUM_DRAFTS}",
        f"dense.step_log={step_log}",
        f"dense.metrics_address={address}",
    )
    with gpu_cluster(tmp_path / "on", *served, *settings) as cluster:
        for _ in range(10):
            [alone] = collect_all(cluster.gateway, [KNOWN])
            assert alone.token_ids[0] == answer[:NUM_KNOWN]
        drafts, accepted = draft_counts(address)
        assert accepted > 0.5 * drafts > 0, "captured steps keep the residuals that the head was made for"
        assert [token_ids(cluster) for _ in range(2)] == [expected] * 2
        assert token_ids(cluster, kills=True) == expected
    steps = [json.loads(line) for line in step_log.read_text().splitlines()]
    assert any(step.get("draft_ms", 0.0) > 0.0 for step in steps)
