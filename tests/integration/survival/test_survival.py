"""Workers die under streams of every kind: the streams pause and get the same tokens, also without a launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from services.pb import gateway_pb2
from tests.support.clients.streams import (
    STREAM_TIMEOUT_S,
    Collected,
    collect,
    collect_all,
    messages_of_every_kind,
)
from tests.support.cluster import request
from tests.support.models import TWO_LAYERS
from tests.support.plain_services import PlainServices, plain_services
from tests.support.workers.faulty_attn_worker import FAULT_FILE
from tests.support.workers.poisoned_attn_worker import NUM_TOKENS
from tests.support.workers.poisoned_dense_worker import POISON

pytestmark = pytest.mark.timeout(400)  # processes start and stop several times, and the machine may be slow

PROMPT = "Count from 1 to 500, slowly, and tell of every number what you like about it. " * 5
MAX_TOKENS = 60
POISONED_DENSE = {"dense_worker": "tests.support.workers.poisoned_dense_worker"}
POISONED_ATTENTION = {"attn_worker": "tests.support.workers.poisoned_attn_worker"}
FAULTY_ATTENTION = {"attn_worker": "tests.support.workers.faulty_attn_worker"}
MAX_ROUNDS = 5  # on a busy machine a stream may end before the disturbance comes


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainServices]:
    """The prefix cache is off, so that only a kept sequence saves its prompt from being computed again."""
    directory = tmp_path_factory.mktemp("plain")
    with plain_services(directory, TWO_LAYERS, "attention.enable_prefix_cache=false") as services:
        yield services


@pytest.fixture(scope="module")
def messages(services: PlainServices) -> list[gateway_pb2.GenerateRequest]:
    text = collect(services.gateway, request(PROMPT, MAX_TOKENS, ignore_eos=True)).text[0]
    return messages_of_every_kind(PROMPT, MAX_TOKENS, stop=text[-12:])


@pytest.fixture(scope="module")
def undisturbed(services: PlainServices, messages: list[gateway_pb2.GenerateRequest]) -> list[Collected]:
    return collect_all(services.gateway, messages)


@pytest.mark.parametrize(
    "roles", [("dense_worker",), ("attn_worker",), ("dense_worker", "attn_worker")], ids=" and ".join
)
def test_streams_end_as_without_the_kill(
    services: PlainServices,
    messages: list[gateway_pb2.GenerateRequest],
    undisturbed: list[Collected],
    roles: tuple[str, ...],
) -> None:
    before, starts = services.wait_idle().num_computed_tokens, dict(services.num_starts)

    def kill() -> None:
        services.kill(*roles)

    for collected, expected in zip(collect_all(services.gateway, messages, kill), undisturbed, strict=True):
        collected.assert_equals(expected)
    for role in services.num_starts:
        assert services.num_starts[role] - starts[role] == (role in roles), services.ends
    computed = services.wait_idle().num_computed_tokens - before
    num_prompt_tokens = len(services.gateway.Tokenize(gateway_pb2.TokenizeRequest(text=PROMPT)).token_ids)
    if roles == ("dense_worker",):  # the attention worker lives on, and with it its counter
        num_tokens = sum(len(token_ids) for each in undisturbed for token_ids in each.token_ids.values())
        needed = len(messages) * num_prompt_tokens + num_tokens  # several answers share the work on their prompt
        # An aborted step is computed again, as are tokens that had not reached the gateway. There are few of them.
        assert computed < needed + num_prompt_tokens, "a prompt was prefilled again"


@pytest.mark.parametrize("role", ["attn_worker", "dense_worker"])
def test_a_kill_within_the_plan_that_opens_sequences_changes_no_token(
    services: PlainServices,
    messages: list[gateway_pb2.GenerateRequest],
    undisturbed: list[Collected],
    role: str,
) -> None:
    """The attention worker is stopped before they come, so that it answers nothing. One of them is cancelled."""
    services.wait_idle()
    attention = services.pid_of("attn_worker")
    os.kill(attention, signal.SIGSTOP)
    cancelled = services.gateway.GenerateStream(request(PROMPT, MAX_TOKENS, ignore_eos=True))
    with ThreadPoolExecutor(len(messages)) as threads:
        answers = [threads.submit(collect, services.gateway, each) for each in messages]
        deadline = time.monotonic() + STREAM_TIMEOUT_S
        while not services.dense_status().num_running and time.monotonic() < deadline:
            time.sleep(0.01)
        num_running = services.dense_status().num_running
        cancelled.cancel()
        services.kill(role)
        with contextlib.suppress(ProcessLookupError):
            os.kill(attention, signal.SIGCONT)
        for answer, expected in zip(answers, undisturbed, strict=True):
            answer.result().assert_equals(expected)
    assert num_running, "no sequence ran without an answer of the attention worker"
    services.wait_idle()


def test_a_killed_gateway_breaks_its_streams_and_the_workers_close_its_sequences(
    services: PlainServices, messages: list[gateway_pb2.GenerateRequest], undisturbed: list[Collected]
) -> None:
    starts, long = dict(services.num_starts), request(PROMPT, 10 * MAX_TOKENS, ignore_eos=True)
    errors: list[grpc.RpcError] = []
    num_kills = 0
    while not errors:  # a stream may end before the kill
        assert num_kills < MAX_ROUNDS, "each stream was whole"
        stream = services.gateway.GenerateStream(long, wait_for_ready=True)
        next(stream)
        services.kill("gateway")
        num_kills += 1
        try:
            list(stream)
        except grpc.RpcError as error:
            errors.append(error)
        services.wait_idle(timeout_s=60.0)
        assert (services.dense_status().num_running, services.dense_status().num_waiting) == (0, 0)
        services.wait_serving(starts["gateway"] + num_kills)
    assert errors[0].code() is grpc.StatusCode.UNAVAILABLE
    stream = services.gateway.GenerateStream(messages[0], wait_for_ready=True)
    token_ids = [token_id for chunk in stream for token_id in chunk.token_ids]
    assert token_ids == undisturbed[0].token_ids[0]
    assert {role: services.num_starts[role] - starts[role] for role in starts} == {
        "attn_worker": 0, "dense_worker": 0, "gateway": num_kills
    }


def test_a_request_that_kills_the_dense_worker_is_failed_alone(tmp_path: Path) -> None:
    with plain_services(tmp_path, TWO_LAYERS, modules=POISONED_DENSE) as services:
        innocent = [request(f"Count from {i}", 80, temperature=0.9, seed=i, ignore_eos=True) for i in range(6)]
        undisturbed = collect_all(services.gateway, innocent)
        starts = dict(services.num_starts)
        errors: list[grpc.RpcError] = []

        def send_poison() -> None:
            with pytest.raises(grpc.RpcError) as caught:
                collect(services.gateway, request([5, *POISON, 6], 10, request_id="poison"))
            errors.append(caught.value)

        for collected, expected in zip(collect_all(services.gateway, innocent, send_poison), undisturbed, strict=True):
            collected.assert_equals(expected)
        assert errors[0].code() is grpc.StatusCode.ABORTED
        assert "'poison'" in errors[0].details() and "crashes" in errors[0].details()
        assert 2 <= services.num_starts["dense_worker"] - starts["dense_worker"] <= 3
        services.wait_idle()
        start = time.monotonic()
        with pytest.raises(grpc.RpcError) as caught:  # alone on the server, two crashes are enough
            collect(services.gateway, request([5, *POISON, 6], 10))
        assert caught.value.code() is grpc.StatusCode.ABORTED and "2 crashes" in caught.value.details()
        assert time.monotonic() - start < 100


def test_a_request_that_kills_the_attention_worker_is_failed(tmp_path: Path) -> None:
    with plain_services(tmp_path, TWO_LAYERS, modules=POISONED_ATTENTION) as services:
        with pytest.raises(grpc.RpcError) as caught:
            collect(services.gateway, request([5] * NUM_TOKENS, 10))
        assert caught.value.code() is grpc.StatusCode.ABORTED and "2 crashes" in caught.value.details()
        assert len(collect(services.gateway, request([5] * (NUM_TOKENS + 1), 10, ignore_eos=True)).token_ids[0]) == 10


def test_a_single_long_request_survives_two_quick_kills_of_the_attention_worker(tmp_path: Path) -> None:
    """The second kill comes while prompt and tokens are computed again, which takes many steps."""
    settings = (TWO_LAYERS, "scheduler.max_num_seqs=2", "scheduler.max_num_batched_tokens=2")
    with plain_services(tmp_path, *settings) as services:
        message = request([5, 6, 7, 8] * 30, 60, temperature=0.9, seed=1, ignore_eos=True)
        expected = collect(services.gateway, message)

        def kill_twice() -> bool:
            """Whether the stream still ran at the second kill."""
            has_begun = threading.Event()
            with ThreadPoolExecutor(1) as threads:
                stream = threads.submit(collect, services.gateway, message, has_begun.set)
                assert has_begun.wait(STREAM_TIMEOUT_S)
                services.kill("attn_worker")
                while num_attention_steps(services) == 0 and not stream.done():
                    time.sleep(0.002)
                is_running = not stream.done()
                services.kill("attn_worker")
                stream.result().assert_equals(expected)
            return is_running

        num_starts, num_rounds = services.num_starts["attn_worker"], 0
        is_running = False
        while not is_running:
            assert num_rounds < MAX_ROUNDS, "each stream ended before the second kill"
            num_rounds += 1
            is_running = kill_twice()
        assert services.num_starts["attn_worker"] == num_starts + 2 * num_rounds
        services.wait_idle(timeout_s=60.0)


def num_attention_steps(services: PlainServices) -> int:
    try:
        return services.attention_status().num_steps
    except grpc.RpcError:
        return 0  # it has just been started


def test_an_attention_worker_whose_gpu_has_failed_ends_and_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = tmp_path / "fault"
    monkeypatch.setenv(FAULT_FILE, str(fault))
    with plain_services(tmp_path, TWO_LAYERS, modules=FAULTY_ATTENTION) as services:
        messages = [request(f"Count from {i}", 80, temperature=0.9, seed=i, ignore_eos=True) for i in range(4)]
        undisturbed = collect_all(services.gateway, messages)
        for _ in range(MAX_ROUNDS):
            disturbed = collect_all(services.gateway, messages, fault.touch)
            for collected, expected in zip(disturbed, undisturbed, strict=True):
                collected.assert_equals(expected)
            services.wait_idle()
            if not fault.exists():
                break
            fault.unlink()  # all streams had ended before the fault came
        deadline = time.monotonic() + STREAM_TIMEOUT_S
        while not services.ends:  # it may come in a step that no stream needs any more
            assert time.monotonic() < deadline, "the worker goes on"
            time.sleep(0.02)
        assert [role for role, _ in services.ends] == ["attn_worker"]
        assert "an illegal memory access" in services.log("attn_worker")


def test_planned_restarts_do_not_count_as_crashes(tmp_path: Path) -> None:
    """An operator restarts the workers three times, each time before the stream gets a token."""
    with plain_services(tmp_path, TWO_LAYERS, modules=POISONED_DENSE) as services:
        message = request("Count", 60, temperature=0.9, seed=3, ignore_eos=True)
        [expected] = collect_all(services.gateway, [message])

        def restart_all() -> None:
            for role in ("dense_worker", "attn_worker", "dense_worker"):
                pid = services.pid_of(role)
                os.kill(pid, signal.SIGTERM)
                while services.pid_of(role) == pid:
                    time.sleep(0.02)

        [collected] = collect_all(services.gateway, [message], restart_all)
        collected.assert_equals(expected)
        assert "is_crash=True" not in services.log("dense_worker")
        assert "a worker crashed" not in services.log("gateway")
