"""/admin/weights serves other weights under streams: every token is what `transformers` predicts with the weights that
had to predict it.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx2
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from services.common.config import EMBEDDED_MODEL
from tests.support.clients.http_clients import client
from tests.support.cluster import Cluster, running_cluster

PROMPTS = [[1, *range(5 + shift, 25 + shift)] for shift in range(3)]
MAX_TOKENS = 100  # later the text repeats itself, whatever the weights
ATTEMPTS = 5
WAIT_S = 60.0
STREAMS_S = 200.0

pytestmark = pytest.mark.timeout(400)  # processes start several times, and the machine may be slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of one shape, `a` and `b`."""
    directory = tmp_path_factory.mktemp("models")
    for name in "ab":
        shutil.copytree(EMBEDDED_MODEL, directory / name)
    weights = load_file(directory / "b" / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"] *= 0.25
    save_file(weights, directory / "b" / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def references(directory: Path) -> dict[str, PreTrainedModel]:
    return {name: AutoModelForCausalLM.from_pretrained(directory / name, dtype=torch.float32) for name in "ab"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, directory: Path) -> Iterator[Cluster]:
    settings = (f"model.path={directory / 'a'}", f"gateway.weights_directory={directory}")
    with running_cluster(tmp_path_factory.mktemp("weights"), *settings, is_warm=True) as cluster:
        yield cluster


@pytest.fixture
def weights_a(cluster: Cluster) -> None:
    reply = change(cluster, "a", "abort")
    assert reply.status_code == 200, reply.text


def change(cluster: Cluster, model: str, mode: str, **options: object) -> httpx2.Response:
    with client(cluster.http_address) as http:
        return http.post("/admin/weights", json={"model": model, "mode": mode, **options}, timeout=200)


Answer = tuple[list[int], list[int]]  # a prompt, and the tokens of its answer


def change_under_streams(
    cluster: Cluster, mode: str, max_tokens: int = MAX_TOKENS, **options: object
) -> tuple[httpx2.Response, list[Answer], list[grpc.StatusCode]]:
    """The reply to the change from `a` to `b`; the answers and the errors of streams before, during and after it.

    However long the new worker takes to start, streams run then: each that ends is followed by another one.
    """
    answers, errors, is_over = list[Answer](), list[grpc.StatusCode](), threading.Event()

    def generate(prompt: list[int]) -> None:
        deadline = time.monotonic() + STREAMS_S
        while not is_over.is_set():
            assert time.monotonic() < deadline, "the change does not end"
            try:
                answers.append((prompt, cluster.generate(prompt, max_tokens, ignore_eos=True).token_ids))
            except grpc.RpcError as error:
                errors.append(error.code())

    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        running = [threads.submit(generate, prompt) for prompt in PROMPTS]
        try:
            deadline = time.monotonic() + WAIT_S
            while cluster.dense_status().num_running < len(PROMPTS):
                assert time.monotonic() < deadline, "the streams do not run"
                time.sleep(0.02)
            reply = change(cluster, "b", mode, **options)
        finally:
            is_over.set()
        for each in running:
            each.result()
    return reply, answers, errors


def is_predicted(model: PreTrainedModel, prompt: list[int], token_ids: list[int]) -> list[bool]:
    """Of each token, whether the model finds it the most likely one after those before."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]
    return [predicted == token for predicted, token in zip(logits.argmax(-1).tolist(), token_ids, strict=True)]


@pytest.mark.usefixtures("weights_a")
def test_kept_requests_go_on_with_the_new_weights(cluster: Cluster, references: dict[str, PreTrainedModel]) -> None:
    for _ in range(ATTEMPTS):
        reply, answers, errors = change_under_streams(cluster, "keep")
        assert reply.status_code == 200 and reply.json()["has_other_weights"], reply.text
        assert not errors
        num_changed = 0
        for prompt, token_ids in answers:
            old, new = (is_predicted(references[name], prompt, token_ids) for name in "ab")
            num_old = old.index(False) if False in old else len(old)
            assert all(new[num_old:]), "from there on all tokens are of the new weights, also of their keys and values"
            num_changed += not all(old) and not all(new)
        if num_changed:
            return
        assert change(cluster, "a", "abort").status_code == 200
    raise AssertionError(f"in {ATTEMPTS} changes the weights changed in the middle of no answer")


@pytest.mark.usefixtures("weights_a")
def test_running_requests_end_with_the_old_weights_if_the_change_waits(
    cluster: Cluster, references: dict[str, PreTrainedModel]
) -> None:
    reply, answers, errors = change_under_streams(cluster, "wait", wait_timeout_s=WAIT_S)
    assert reply.status_code == 200, reply.text
    assert not errors
    for prompt, token_ids in answers:
        assert any(all(is_predicted(references[name], prompt, token_ids)) for name in "ab"), "of one model alone"
    later = cluster.generate(PROMPTS[0], 100, ignore_eos=True).token_ids
    assert all(is_predicted(references["b"], PROMPTS[0], later))


@pytest.mark.usefixtures("weights_a")
def test_a_change_that_waits_too_long_is_undone(cluster: Cluster, references: dict[str, PreTrainedModel]) -> None:
    reply, answers, errors = change_under_streams(cluster, "wait", 150, wait_timeout_s=0.01)
    assert reply.status_code == 409 and "requests still run after 0.01 s" in reply.text, reply.text
    assert not errors
    for prompt, token_ids in answers:
        assert all(is_predicted(references["a"], prompt, token_ids))
    later = cluster.generate(PROMPTS[0], 100, ignore_eos=True).token_ids
    assert all(is_predicted(references["a"], PROMPTS[0], later)), "new requests are started again"


@pytest.mark.usefixtures("weights_a")
def test_aborted_requests_end_with_an_error(cluster: Cluster, references: dict[str, PreTrainedModel]) -> None:
    reply, answers, errors = change_under_streams(cluster, "abort")
    assert reply.status_code == 200, reply.text
    assert set(errors) == {grpc.StatusCode.ABORTED}
    for prompt, token_ids in answers:
        assert any(all(is_predicted(references[name], prompt, token_ids)) for name in "ab"), "none goes on"


@pytest.mark.parametrize(("model", "status"), [("../x", 400), ("/", 400), ("", 400), ("c", 404)])
def test_only_models_below_the_directory_can_be_served(cluster: Cluster, model: str, status: int) -> None:
    assert change(cluster, model, "keep").status_code == status
