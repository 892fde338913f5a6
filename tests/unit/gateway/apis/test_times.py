"""`timings` as in llama.cpp and `metrics` as in vLLM: by their definitions, and against the client's clock."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from services.gateway.apis.openai.measured_format import request_metrics
from services.gateway.apis.shared.timings import timings
from services.gateway.core.chunks import Finish
from services.gateway.link.journal_entry import FinishReason, Timings
from tests.support.clients.gateway_calls import EOS, ids
from tests.support.clients.http_clients import events, named_events
from tests.support.clients.http_gateway import CHAT, CHATS, COMPLETIONS, with_client
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense

TEXT = " in a city of one"
METRICS = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"}
RATES = {"n", "ms", "per_token_ms", "per_second"}
TIMINGS = {"cache_n"} | {f"{kind}_{each}" for kind in ("prompt", "predicted") for each in RATES}


def finish(num_tokens: int, times: Timings) -> Finish:
    return Finish(FinishReason.LENGTH, None, None, 50, 20, num_tokens, 1, times)


def test_times_follow_the_definitions_of_both_servers() -> None:
    """Queued at 0.0, first step at 0.25, tokens at 1.25, 1.75, ..., 4.25 and the end at 4.5 seconds."""
    ended = finish(7, Timings(queue_s=0.25, first_token_s=1.25, per_token_s=0.5, total_s=4.5))
    assert request_metrics(ended) == {
        "time_to_first_token_ms": 1000.0,
        "generation_time_ms": 3000.0,
        "queue_time_ms": 250.0,
        "mean_itl_ms": 500.0,
        "tokens_per_second": 7 / 4.0,
    }
    assert timings(ended) == {
        "cache_n": 20,
        "prompt_n": 30,
        "prompt_ms": 1000.0,
        "prompt_per_token_ms": 1000.0 / 30,
        "prompt_per_second": 30.0,
        "predicted_n": 7,
        "predicted_ms": 3250.0,
        "predicted_per_token_ms": 3250.0 / 7,
        "predicted_per_second": 7 / 3.25,
    }
    single = request_metrics(finish(1, Timings(0.25, 1.25, None, 1.5)))
    assert (single["generation_time_ms"], single["mean_itl_ms"], single["tokens_per_second"]) == (0.0, None, 1.0)
    aborted = request_metrics(finish(0, Timings(None, None, None, 2.0)))
    assert set(aborted) == METRICS and not any(aborted.values())


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, {"prompt": "a"}), (CHATS, CHAT)])
def test_answers_have_times_only_if_asked_for_and_within_the_clients_own(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        begin = time.monotonic()
        answer = (await client.post(path, json=body | {"timings_per_token": True})).json()
        client_ms = 1e3 * (time.monotonic() - begin)
        metrics, found = answer["metrics"], answer["timings"]
        assert set(metrics) == METRICS and set(found) == TIMINGS
        parts = ("queue_time_ms", "time_to_first_token_ms", "generation_time_ms")
        assert 0 < sum(metrics[name] for name in parts) <= client_ms
        assert 0 < found["prompt_ms"] + found["predicted_ms"] <= client_ms
        assert found["predicted_n"] == answer["usage"]["completion_tokens"] == len(ids(TEXT)) + 1
        assert found["prompt_n"] + found["cache_n"] == answer["usage"]["prompt_tokens"]

        stream = body | {"stream": True, "stream_options": {"include_usage": True}, "timings_per_token": True}
        pieces = events((await client.post(path, json=stream)).text)
        *pieces, last = [each for each in pieces if each["choices"] == [] or "timings" in each]
        assert set(last["metrics"]) == METRICS and "metrics" not in pieces[-1]
        assert [each["timings"]["predicted_n"] for each in pieces] == sorted(
            each["timings"]["predicted_n"] for each in pieces
        )
        assert last["timings"] == pieces[-1]["timings"]
        assert all(set(each["timings"]) == TIMINGS for each in pieces)
        counts = {(each["timings"]["cache_n"], each["timings"]["prompt_n"]) for each in pieces}
        assert counts == {(1, answer["usage"]["prompt_tokens"] - 1)}, "the first piece knows what was cached"

        several = (await client.post(path, json=body | {"n": 2, "timings_per_token": True})).json()
        assert "metrics" not in several and "timings" not in several
        assert [set(choice["timings"]) for choice in several["choices"]] == [TIMINGS] * 2
        plain = (await client.post(path, json=body)).json()
        assert "timings" not in plain

    dense = FakeDense(lambda submit: [*ids(TEXT), EOS])
    dense.num_cached_tokens = 1
    with_client(tmp_path, dense, test, request_metrics=True)


def test_responses_have_times_as_with_llama_cpp(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        body = {"input": "Hi", "timings_per_token": True}
        whole = (await client.post("/v1/responses", json=body)).json()
        usage = whole["usage"]
        assert set(whole["timings"]) == TIMINGS
        assert (whole["timings"]["predicted_n"], whole["timings"]["prompt_n"]) == (
            usage["output_tokens"], usage["input_tokens"],
        )  # fmt: skip
        sent = named_events((await client.post("/v1/responses", json=body | {"stream": True})).text)
        timed = {each["type"] for each in sent if "timings" in each}
        assert {"response.output_text.delta", "response.completed"} <= timed
        assert timed.isdisjoint({"response.created", "response.in_progress"})
        assert all(set(each["timings"]) == TIMINGS for each in sent if "timings" in each)
        assert sent[-1]["timings"]["predicted_n"] == len(ids(TEXT)) + 1
        plain = (await client.post("/v1/responses", json={"input": "Hi"})).json()
        assert "timings" not in plain

    with_client(tmp_path, FakeDense(lambda submit: [*ids(TEXT), EOS]), test)


def test_a_server_that_gives_no_metrics_gives_none(tmp_path: Path) -> None:
    async def test(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
        answer = (await client.post(COMPLETIONS, json={"prompt": "a"})).json()
        assert "metrics" not in answer and "timings" not in answer
        timed = (await client.post(COMPLETIONS, json={"prompt": "a", "timings_per_token": True})).json()
        assert "metrics" not in timed and set(timed["timings"]) == TIMINGS

    with_client(tmp_path, FakeDense(lambda submit: [*ids(TEXT), EOS]), test)
