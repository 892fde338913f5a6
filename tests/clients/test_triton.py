"""NVIDIA's `tritonclient` and programs like TensorRT-LLM's own clients, against a real cluster.

They run in an environment of their own (`make clients`). What they get must be what the gRPC API gives.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.common.config import EMBEDDED_MODEL
from services.pb import gateway_pb2
from tests.clients.environments import Environment
from tests.clients.test_clients import MAX_ROUNDS, PROGRAMS, needs, run
from tests.support.clients.gateway_calls import REFERENCE, text_of
from tests.support.cluster import REQUEST_TIMEOUT_S, Cluster, free_port, running_cluster
from tests.support.prompt_vectors import embeddings_of, random_vectors, tokens_after_vectors
from tests.support.reference import VOCAB_SIZE

PROMPT = "San Francisco is a"
PROMPT_IDS = REFERENCE(PROMPT)["input_ids"]
NUM_TOKENS = 12
EXPECTED_MODELS = ["ensemble", "preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls", "embedding"]
pytestmark = needs("triton")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    address = f"gateway.http_address=127.0.0.1:{free_port()}"
    with running_cluster(tmp_path_factory.mktemp("triton"), address, "gateway.enable_prompt_embeds=true") as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.wait_idle()


def truth(cluster: Cluster, num_tokens: int, **options: Any) -> gateway_pb2.Completion:
    request = gateway_pb2.GenerateRequest(prompt=PROMPT, max_tokens=num_tokens, logprobs=0, **options)
    request.sampling.temperature = 0
    [answer] = cluster.gateway.Generate(request, timeout=REQUEST_TIMEOUT_S).completions
    return answer


def output_of(program: str, *arguments: str) -> Any:
    command = [Environment("triton").program("python"), str(PROGRAMS / program), *arguments]
    return json.loads(run(command).splitlines()[-1])


def inflight(
    cluster: Cluster,
    directory: Path,
    *options: str,
    prompt: Sequence[int] = PROMPT_IDS,
    expected: Sequence[int] | None = None,
) -> Any:
    """What the program like inflight_batcher_llm_client prints."""
    tokens = directory / "input.csv"
    tokens.write_text(",".join(map(str, prompt)))
    if expected is not None:
        (directory / "output.csv").write_text(",".join(map(str, expected)))
        options = (*options, "--check-output", "--output-tokens-csv", str(directory / "output.csv"))
    return output_of("inflight_batcher.py", "--url", cluster.address, "--input-tokens-csv", str(tokens), *options)


def test_every_call_of_tritonclient(cluster: Cluster) -> None:
    answer = truth(cluster, NUM_TOKENS)
    token_ids = [*PROMPT_IDS, *answer.token_ids]
    text = text_of(token_ids)
    for _ in range(MAX_ROUNDS):
        got = output_of("with_tritonclient.py", cluster.address, cluster.http_address, PROMPT, str(NUM_TOKENS))
        if all(len(pieces) > 1 for pieces in got["streamed"]["pieces"].values()):
            break
    for about in got["about"]:
        assert about == {
            "live": True,
            "ready": True,
            "models": EXPECTED_MODELS,
            "version": True,
            "server": "twostroke",
            "index": EXPECTED_MODELS,
            "batch": 64,
            "first_input": "input_ids",
            "decoupled": True,
        }
    for steps in got["steps"]:
        assert steps["token_ids"] == token_ids
        assert steps["texts"] == [text] * 3
        assert steps["log_probs"] == [1, 1, NUM_TOKENS]
        expected = sum(each.logprob for each in answer.logprobs)
        assert steps["cum_log_probs"] == pytest.approx(expected, abs=1e-4)
        assert steps["sum_log_probs"] == pytest.approx(expected, abs=1e-4)
    for unknown, missing, negative, beams in got["errors"]:
        assert unknown.startswith(("StatusCode.NOT_FOUND", "404")) and "unknown model 'nothing'" in unknown
        for error, words in ((missing, "max_tokens"), (negative, "max_tokens is -12"), (beams, "beam_width is 1200")):
            assert error.startswith(("StatusCode.INVALID_ARGUMENT", "400")) and words in error
    for request_id in ("a", "b"):
        pieces = got["streamed"]["pieces"][request_id]
        assert PROMPT + "".join(pieces) == text and len(pieces) > 1
        assert got["streamed"]["finals"][request_id] == [False] * (len(pieces) - 1) + [True]
    assert got["compressed"] == text and got["several"] == [text] * 4 and got["plain"] == [text]
    assert min(got["statistics"]) >= 8


@pytest.mark.parametrize("options", [[], ["--streaming"], ["--exclude-input-in-output"], ["--request-id", "12345"]])
def test_the_inflight_batcher_client_checks_its_output(cluster: Cluster, tmp_path: Path, options: list[str]) -> None:
    answer = truth(cluster, NUM_TOKENS)
    expected = [*([] if "--exclude-input-in-output" in options else PROMPT_IDS), *answer.token_ids]
    got = inflight(
        cluster, tmp_path, *options, "--request-output-len", str(NUM_TOKENS), "--return-log-probs", expected=expected
    )
    assert got["log_probs"] == pytest.approx([each.logprob for each in answer.logprobs], abs=1e-5)
    if "--streaming" not in options:
        assert got["length"] == len(expected)
    outputs = ["--requested-outputs", "output_ids", "sequence_length"]
    inflight(cluster, tmp_path, *options, *outputs, "--request-output-len", str(NUM_TOKENS), expected=expected)


@pytest.mark.parametrize("options", [[], ["--streaming"]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_inflight_batcher_client_sends_the_table_of_its_task(
    cluster: Cluster, tmp_path: Path, options: list[str], dtype: torch.dtype
) -> None:
    tables = torch.stack([random_vectors(EMBEDDED_MODEL, 6, seed) for seed in (1, 2)]).to(dtype)
    path = tmp_path / "tables.npy"
    np.save(path, tables.numpy())
    prompt = [*range(VOCAB_SIZE, VOCAB_SIZE + 6), *PROMPT_IDS]
    for task_id, table in enumerate(tables.float()):
        vectors = torch.cat([table, embeddings_of(EMBEDDED_MODEL, PROMPT_IDS)])
        expected = [*prompt, *tokens_after_vectors(EMBEDDED_MODEL, vectors, NUM_TOKENS)]
        more = ["--end-id", "-1", "--request-output-len", str(NUM_TOKENS), "--prompt-task-id", str(task_id)]
        more += ["--prompt-embedding-table-path", str(path)]
        inflight(cluster, tmp_path, *options, *more, prompt=prompt, expected=expected)


@pytest.mark.parametrize("is_streaming", [True, False])
@pytest.mark.parametrize("is_cancelled", [True, False])
def test_the_inflight_batcher_client_stops_a_request(
    cluster: Cluster, tmp_path: Path, is_streaming: bool, is_cancelled: bool
) -> None:
    """`end_id` -1: nothing else would end the request before its 2000 tokens."""
    options = ["--request-output-len", "2000", "--end-id", "-1", "--request-id", "7"]
    options += ["--streaming"] * is_streaming + ["--stop-via-request-cancel"] * is_cancelled
    # On a busy machine the first token may come late, or the stop after the last one.
    for stop_after_ms in (200, 400, 800, 1600, 100, 200, 400):
        got = inflight(cluster, tmp_path, *options, "--stop-after-ms", str(stop_after_ms))
        has_tokens = len(got["token_ids"]) > len(PROMPT_IDS) or (is_cancelled and not is_streaming)  # it has no answer
        if has_tokens and not got["is_whole"]:
            break
    assert not got["is_whole"], "the request ended before each stop"
    expected = [*PROMPT_IDS, *truth(cluster, 2000, ignore_eos=True).token_ids]
    assert got["token_ids"] == expected[: len(got["token_ids"])], "what came before the stop is right"
    assert got["cancelled"] == is_cancelled
    if not (is_cancelled and not is_streaming):
        assert len(got["token_ids"]) > len(PROMPT_IDS)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_end_to_end_client_gets_the_same_from_the_steps_and_from_the_ensemble(
    cluster: Cluster, tmp_path: Path, protocol: str
) -> None:
    texts = ["San Francisco is", "The capital of France", "東京 is a city", "Who are you? 🙂 Łódź"]
    dataset = tmp_path / "dataset.json"
    data = [{"input": text, "instruction": "in short:", "output": "five words or so here"} for text in texts]
    dataset.write_text(json.dumps([*data, {"input": "long " * 100, "instruction": "", "output": "left out"}]))
    url = cluster.address if protocol == "grpc" else cluster.http_address
    options = ["--url", url, "--protocol", protocol, "--max-input-len", "50", "--dataset", str(dataset)]
    answers = output_of("end_to_end.py", *options)
    assert len(answers) == len(texts)
    for answer, text in zip(answers, texts, strict=True):
        assert answer.startswith(f"{text} in short:") and len(answer) > len(f"{text} in short:")
