"""TensorRT on the GPU at hand: its numbers, its CUDA graphs, a cluster that it serves, and replacements under load."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

pytest.importorskip("onnx", reason="onnx is not installed: `pip install -r requirements-export.txt`")

from bench import tensorrt_check
from bench.tensorrt_check import Subject, make_subject
from services.common.batch_buckets import token_buckets
from services.common.config import EMBEDDED_MODEL
from services.common.errors import ConfigError
from services.common.model_config import load_model_config
from services.dense_worker.model.weights import load_weights
from services.dense_worker.tensorrt.api import TensorRT
from services.dense_worker.tensorrt.profiles import parse_profiles
from tests.gpu.gpu_cluster import DEVICE, gpu_cluster
from tests.gpu.usable_tensorrt import usable_tensorrt
from tests.support.cluster import REPOSITORY, Cluster, ctl
from tests.support.reference import reference_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

PROFILES = "1,16,17-512"  # each plan takes some seconds to build
MAX_NUM_SEQS = 32
BUILD_TIMEOUT_S = 600.0
PLANS_VARIABLE = "TWOSTROKE_TEST_PLANS"  # of the environment
NUM_TOKENS = 60
NEAR_TIE = 0.05  # of log-probabilities: 8.6 sums products in float16, so logits are off by up to 7e-3 of the greatest
PROMPTS = (
    "San Francisco is a",
    "Count from 1",
    "Q: What is the capital of France?",
    "Once upon a time",
    "The first three prime numbers are",
    "Hello",
    "def main():",
    "In the year 1969",
)


@pytest.fixture(scope="module")
def api() -> TensorRT:
    return usable_tensorrt()


@pytest.fixture(scope="module")
def plan_dir(api: TensorRT, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plans of the embedded model in float16, built by the command; those in PLANS_VARIABLE's directory are kept."""
    kept = os.environ.get(PLANS_VARIABLE)
    directory = tmp_path_factory.mktemp("plans") if kept is None else Path(kept)
    build_plans(directory, "--profiles", PROFILES)
    return directory


def build_plans(directory: Path, *options: str) -> None:
    """Builds plans of the embedded model in float16 by the command, unless the directory has them."""
    command = [sys.executable, "-m", "services.dense_worker.tensorrt.build", "--model", str(EMBEDDED_MODEL)]
    command += ["--dtype", "float16", "--output-dir", str(directory), *options]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=BUILD_TIMEOUT_S)


@pytest.fixture(scope="module")
def subject(api: TensorRT, plan_dir: Path) -> Iterator[Subject]:
    """The embedded model with these plans, on a stream of its own."""
    device = torch.device(DEVICE, 0)
    config = load_model_config(EMBEDDED_MODEL)
    weights = load_weights(EMBEDDED_MODEL, config, torch.float16, device)
    with torch.cuda.stream(torch.cuda.Stream()), torch.inference_mode():
        made, lines = make_subject(api, config, torch.float16, weights, parse_profiles(PROFILES), plan_dir)
        assert all("found" in line for line in lines), "the command has built other plans than the worker needs"
        torch.cuda.synchronize()
        yield made


def settings(plan_dir: Path, backend: str) -> tuple[str, ...]:
    return (
        "model.dtype=float16",
        f"dense.backend={backend}",
        "dense.build=never",
        f"dense.plan_dir={plan_dir}",
        f"dense.profiles={PROFILES}",
        f"scheduler.max_num_seqs={MAX_NUM_SEQS}",
        "scheduler.max_num_batched_tokens=512",
    )


def generate_all(cluster: Cluster) -> list[list[int]]:
    """Greedy tokens after each prompt, all prompts at once."""
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        answers = threads.map(lambda prompt: cluster.generate(prompt, NUM_TOKENS, ignore_eos=True), PROMPTS)
        return [answer.token_ids for answer in answers]


@pytest.fixture(scope="module")
def by_torch(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    with gpu_cluster(tmp_path_factory.mktemp("torch"), *settings(Path("none"), "torch")) as cluster:
        return generate_all(cluster)


def test_errors_are_within_twice_those_of_torch(subject: Subject) -> None:
    sizes = sorted({size for profile in subject.profiles for size in (profile.low, profile.best, profile.high)})
    tensorrt_check.check_agreement(subject, sizes)


def test_squares_beyond_float16_are_normalised_in_float32(subject: Subject) -> None:
    tensorrt_check.check_agreement(subject, [1, 20], scale=3000.0)


@pytest.mark.parametrize("seed", [0, 1])
def test_graphs_of_all_captured_sizes_replay_in_any_order(subject: Subject, seed: int) -> None:
    """Each graph's outputs on new inputs, while other sizes run uncaptured between the replays."""
    sizes = token_buckets(MAX_NUM_SEQS, subject.profiles[-1].high)
    result = tensorrt_check.check_graphs(subject, sizes, seed)
    assert result["num_graphs"] == len(sizes) > 20


def test_a_step_is_enqueued_without_waiting_for_the_gpu(subject: Subject) -> None:
    tensorrt_check.check_no_wait(subject, [1, 64])


def test_a_damaged_plan_is_an_error_that_names_the_segment(api: TensorRT, subject: Subject) -> None:
    plan = subject.plans["middle"][0].plan
    with pytest.raises(ConfigError, match="cannot load the plan of middle: "):
        api.load("middle", b"\0" * 64 + plan[64:])


def test_a_cluster_by_tensorrt_gives_the_tokens_of_torch(
    plan_dir: Path, by_torch: list[list[int]], tmp_path: Path
) -> None:
    with gpu_cluster(tmp_path, *settings(plan_dir, "tensorrt")) as cluster:
        assert "dense backend is TensorRT" in cluster.log_file.read_text()
        alone = [cluster.generate(prompt, NUM_TOKENS, ignore_eos=True).token_ids for prompt in PROMPTS]
        for prompt, *found, expected in zip(PROMPTS, generate_all(cluster), alone, by_torch, strict=True):
            for tokens in found:
                check_greedy(prompt, tokens, expected)


def check_greedy(prompt: str, found: list[int], expected: list[int]) -> None:
    """`found` equals `expected` up to a token that is about as likely as the expected one, by transformers in float32.

    After it the texts have little to do with one another.
    """
    same = [a == b for a, b in zip(found, expected, strict=True)]
    if all(same):
        return
    at = same.index(False)
    context = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)(prompt)["input_ids"] + expected[:at]
    with torch.inference_mode():
        logprobs = reference_model(EMBEDDED_MODEL)(torch.tensor([context])).logits[0, -1].log_softmax(-1)
    assert abs(logprobs[found[at]] - logprobs[expected[at]]) < NEAR_TIE, (prompt, at)


def test_no_request_fails_while_tensorrt_replaces_torch_and_torch_tensorrt(
    plan_dir: Path, by_torch: list[list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    is_over = threading.Event()

    def repeat(index: int) -> list[list[int]]:
        answers = []
        while not is_over.is_set():
            answers.append(cluster.generate(PROMPTS[index], NUM_TOKENS, ignore_eos=True).token_ids)
        return answers

    with gpu_cluster(tmp_path, *settings(plan_dir, "torch")) as cluster, ThreadPoolExecutor(len(PROMPTS)) as threads:
        streams = [threads.submit(repeat, index) for index in range(len(PROMPTS))]
        try:
            for backend in ("tensorrt", "torch"):
                result = ctl(cluster, "replace-dense", "--set", f"dense.backend={backend}")
                assert result.returncode == 0, result.stderr
                with capsys.disabled():
                    print(f"\n{result.stdout.strip()}")
        finally:
            is_over.set()
        for prompt, stream, expected in zip(PROMPTS, streams, by_torch, strict=True):
            answers = stream.result()
            assert answers
            for answer in answers:
                check_greedy(prompt, answer, expected)
        log = cluster.log_file.read_text()
        assert "is_crash=True" not in log
        # Streams wait for what happens after the old worker has left, so that nothing is captured ahead there.
        assert "captured graphs" in log and "captured graphs" not in log.partition("replacing the dense worker")[2]
