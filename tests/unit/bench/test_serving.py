"""The load generator with a scripted gateway, and the whole program with the real gateway."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import httpx2
import pytest

from bench.load.http_transport import HttpTransport
from bench.load.load import Load, replay, shares
from bench.load.stats import RequestRecord, ServingFigures, Summary, num_output_tokens
from bench.load.transport import PROTOCOLS, RequestError, TimedRequest, Transport, open_transport
from bench.serving import format_table, main
from services.gateway.apis.openai.completion_schema import CompletionRequest
from services.gateway.apis.openai.conversion import completion_messages
from services.pb import gateway_pb2, sampling_pb2
from tests.support.running_gateway import RunningGateway, ServiceProcess, run, running_gateway
from tests.support.terminal import terminal
from tests.support.workers.fake_dense import FakeDense
from tests.support.workers.scripted_gateway import ScriptedGateway, served

TABLE = """\
============ Serving Benchmark Result ============
Successful requests:                     50
Benchmark duration (s):                  52.67
Total input tokens:                      14056
Total generated tokens:                  10508
Request throughput (req/s):              0.95
Input token throughput (tok/s):          266.86
Output token throughput (tok/s):         199.50
---------------Time to First Token----------------
Mean TTFT (ms):                          121.19
Median TTFT (ms):                        94.22
P99 TTFT (ms):                           289.86
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          48.93
Median TPOT (ms):                        48.89
P99 TPOT (ms):                           84.22
---------------Inter-token Latency----------------
Mean ITL (ms):                           54.84
Median ITL (ms):                         52.61
P99 ITL (ms):                            206.89
=================================================="""
MS = 1_000_000
NO_ROOM = {"grpc": "RESOURCE_EXHAUSTED: no room", "http": "429 capacity: no room"}


def load(transport: Transport | None, count: int, max_concurrency: int | None = None, gap_ms: int = 0) -> Load:
    requests = []
    for index in range(count):
        message = gateway_pb2.GenerateRequest(request_id=str(index))
        message.prompt_token_ids.ids.extend(range(index + 1))
        encoded = transport.encode(message) if transport is not None else b""
        requests.append(TimedRequest(index, index * gap_ms * MS, message.request_id, encoded))
    return Load("unused", "unused", [], requests, max_concurrency, request_timeout_s=20.0)


async def replay_now(transport: Transport, load: Load) -> list[RequestRecord]:
    return sorted(await replay(transport, load, start_ns=0), key=lambda record: record.index)


over_both = pytest.mark.parametrize("protocol", PROTOCOLS)


@over_both
def test_every_chunk_is_recorded_with_its_tokens(protocol: str, tmp_path: Path) -> None:
    async def test() -> None:
        gateway = ScriptedGateway([1, 3, 0, 2])
        async with served(gateway, protocol, tmp_path) as transport:
            records = await replay_now(transport, load(transport, 3))
        for index, record in enumerate(records):
            assert record.error is None
            assert record.chunk_num_tokens == [1, 3, 0, 2, 0] + [0] * (protocol == "http")  # [DONE] is one more event
            assert num_output_tokens(record) == 6
            assert record.num_prompt_tokens == index + 1
            times = [record.send_ns, *record.chunk_ns, record.end_ns]
            assert times == sorted(times) and len(set(times[:-1])) == len(times[:-1])

    run(test())


@over_both
def test_requests_in_flight_reach_the_limit_and_never_exceed_it(protocol: str, tmp_path: Path) -> None:
    async def test() -> None:
        gateway = ScriptedGateway([1, 1])
        gateway.gate.clear()
        async with served(gateway, protocol, tmp_path) as transport:
            running = asyncio.create_task(replay_now(transport, load(transport, 10, max_concurrency=3)))
            while gateway.num_running < 3:  # noqa: ASYNC110  there is no event to wait for
                await asyncio.sleep(0.001)
            gateway.gate.set()
            assert len(await running) == 10
        assert gateway.max_running == 3
        assert sorted(gateway.request_ids[:3]) == ["0", "1", "2"]

    run(test())


def test_the_first_request_is_sent_before_the_last_one_connects() -> None:
    events = list[tuple[str, int]]()

    class Connecting(HttpTransport):
        async def send(self, request: TimedRequest, timeout_s: float, on_chunk: Callable[[bytes], None]) -> None:
            events.append(("connects", request.index))
            await asyncio.sleep(0)
            events.append(("sends", request.index))

    transport = Connecting(Mock(), "localhost")
    asyncio.run(replay_now(transport, load(transport, 50)))
    assert len(events) == 100
    assert events.index(("sends", 0)) < events.index(("connects", 49))


@over_both
def test_open_loop_sends_without_waiting_for_answers(protocol: str, tmp_path: Path) -> None:
    async def test() -> None:
        gateway = ScriptedGateway([1])
        gateway.gate.clear()
        async with served(gateway, protocol, tmp_path) as transport:
            running = asyncio.create_task(replay_now(transport, load(transport, 5, gap_ms=1)))
            while gateway.num_running < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            gateway.gate.set()
            records = await running
        assert [record.scheduled_ns for record in records] == [0, MS, 2 * MS, 3 * MS, 4 * MS]

    run(test())


@over_both
def test_failed_requests_are_recorded_and_the_others_continue(protocol: str, tmp_path: Path) -> None:
    async def test() -> None:
        gateway = ScriptedGateway([2, 2])
        gateway.errors["1"] = "gave up"
        async with served(gateway, protocol, tmp_path) as transport:
            records = await replay_now(transport, load(transport, 3, max_concurrency=1))
        error = {"grpc": "ABORTED: gave up", "http": "request_aborted: gave up"}[protocol]
        assert [record.error for record in records] == [None, error, None]
        assert num_output_tokens(records[1]) == 4

    run(test())


@over_both
def test_an_answer_without_a_finish_or_with_missing_tokens_counts_as_failed(protocol: str, tmp_path: Path) -> None:
    async def test() -> None:
        gateway = ScriptedGateway([1, 1])
        async with served(gateway, protocol, tmp_path) as transport:
            gateway.num_output_tokens = 3
            [record] = await replay_now(transport, load(transport, 1))
            assert record.error == "2 tokens came, the server counts 3"
            gateway.has_finish = False
            [record] = await replay_now(transport, load(transport, 1))
            assert record.error == "the stream ended without a finish"

    run(test())


@over_both
def test_an_answer_that_takes_too_long_counts_as_failed(protocol: str, tmp_path: Path) -> None:
    async def test() -> None:
        gateway = ScriptedGateway([1])
        gateway.gate.clear()
        async with served(gateway, protocol, tmp_path) as transport:
            hurried = dataclasses.replace(load(transport, 1), request_timeout_s=0.1)
            [record] = await replay_now(transport, hurried)
            gateway.gate.set()
        assert record.error is not None and record.end_ns - record.send_ns < 10_000 * MS
        start = {"grpc": "DEADLINE_EXCEEDED: ", "http": "timeout: no end of the answer within 0.1 s"}[protocol]
        assert record.error.startswith(start)

    run(test())


@pytest.mark.parametrize(("max_concurrency", "limits"), [(None, [None] * 4), (10, [3, 3, 2, 2]), (3, [1, 1, 1])])
def test_processes_share_requests_and_concurrency(max_concurrency: int | None, limits: list[int | None]) -> None:
    whole = load(None, 11, max_concurrency)
    parts = shares(whole, 4)
    assert [part.max_concurrency for part in parts] == limits
    dealt = sorted((request for part in parts for request in part.requests), key=lambda request: request.index)
    assert dealt == whole.requests
    sizes = [len(part.requests) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def summary(mean: float, median: float, p99: float) -> Summary:
    return Summary(mean, median, p90=-1.0, p99=p99, min=-1.0, max=-1.0)


def test_the_table_has_the_usual_rows() -> None:
    figures = ServingFigures(
        num_successful=50,
        num_failed=0,
        duration_s=52.6712,
        total_input_tokens=14056,
        total_cached_tokens=0,
        total_output_tokens=10508,
        request_throughput=0.9493,
        input_throughput=266.8631,
        output_throughput=199.5012,
        ttft_ms=summary(121.19, 94.22, 289.86),
        tpot_ms=summary(48.93, 48.89, 84.22),
        itl_ms=summary(54.84, 52.61, 206.89),
        first_error=None,
    )
    assert format_table(figures) == TABLE


def reaching(gateway: RunningGateway, protocol: str) -> list[str]:
    """The options with which the program reaches the gateway."""
    address = {"grpc": gateway.address, "http": gateway.http_address}[protocol]
    return ["--protocol", protocol, "--address", address]


def recompute(requests: list[dict[str, Any]]) -> dict[str, str]:
    """The table's values, computed from the raw timestamps in a saved file without the program's code."""
    duration_s = max(request["end_ns"] for request in requests) / 1e9
    ttfts, tpots, itls, num_tokens = [], [], [], 0
    for request in requests:
        times_ms = [time / 1e6 for time, n in zip(request["chunk_ns"], request["chunk_num_tokens"], strict=True) if n]
        count = sum(request["chunk_num_tokens"])
        num_tokens += count
        ttfts.append(times_ms[0] - request["send_ns"] / 1e6)
        if count > 1:
            tpots.append((times_ms[-1] - times_ms[0]) / (count - 1))
        itls += [times_ms[i + 1] - times_ms[i] for i in range(len(times_ms) - 1)]
    num_input_tokens = sum(request["num_prompt_tokens"] for request in requests)
    rows = {
        "Successful requests": str(len(requests)),
        "Benchmark duration (s)": f"{duration_s:.2f}",
        "Total input tokens": str(num_input_tokens),
        "Total generated tokens": str(num_tokens),
        "Request throughput (req/s)": f"{len(requests) / duration_s:.2f}",
        "Input token throughput (tok/s)": f"{num_input_tokens / duration_s:.2f}",
        "Output token throughput (tok/s)": f"{num_tokens / duration_s:.2f}",
        "Failed requests": "0",
    }
    for name, values in (("TTFT", ttfts), ("TPOT", tpots), ("ITL", itls)):
        rows[f"Mean {name} (ms)"] = f"{statistics.fmean(values):.2f}"
        rows[f"Median {name} (ms)"] = f"{statistics.median(values):.2f}"
        rows[f"P99 {name} (ms)"] = f"{statistics.quantiles(values, n=100, method='inclusive')[98]:.2f}"
    return rows


@over_both
def test_printed_figures_follow_from_the_saved_timestamps(protocol: str, tmp_path: Path) -> None:
    async def test() -> None:
        dense = FakeDense(lambda submit: [5] * submit.spec.max_tokens, step_s=0.001, vocab_size=500)
        file = tmp_path / "run.json"
        async with running_gateway(tmp_path, dense) as gateway:
            lengths = "--num-prompts 12 --input-len 30 --output-len 8"
            options = f"{lengths} --request-rate 100 --warmup 3 --client-processes 2"
            process = ServiceProcess(
                "bench.serving", *reaching(gateway, protocol), "--json", str(file), *options.split()
            )
            status, stdout, stderr = await process.outcome()
        assert status == 0, stderr
        printed = dict(line.split(":") for line in stdout.splitlines() if ":" in line)
        saved = json.loads(file.read_text())
        expected = recompute(saved["requests"])
        assert {name: printed[name].strip() for name in expected} == expected
        assert [request["index"] for request in saved["requests"]] == list(range(12))
        assert saved["config"]["request_rate"] == 100.0 and saved["model"]["vocab_size"] == 500
        assert saved["config"]["protocol"] == protocol
        assert {"date", "commit", "versions", "figures", "client"} <= saved.keys()

        assert len(dense.submits) == 12 + 3
        assert all(15 <= len(submit.spec.prompt_token_ids) <= 45 for submit in dense.submits)
        assert all(4 <= submit.spec.max_tokens <= 12 for submit in dense.submits)
        assert all(not submit.spec.stop_token_ids for submit in dense.submits), "EOS must be ignored"
        assert len({submit.spec.cache_salt for submit in dense.submits}) == 2, "warm-up and run must not share prefixes"
        numbers = {submit.spec.request_id.rpartition("-")[2] for submit in dense.submits[3:]}
        assert numbers == {str(i) for i in range(12)}
        wanted = sorted(submit.spec.max_tokens for submit in dense.submits[3:])
        assert wanted == sorted(sum(request["chunk_num_tokens"]) for request in saved["requests"])
        sent = sorted(len(submit.spec.prompt_token_ids) for submit in dense.submits[3:])
        assert sent == sorted(request["num_prompt_tokens"] for request in saved["requests"])

    run(test())


def test_several_rates_make_a_file_each_a_table_and_bars_at_a_terminal(tmp_path: Path) -> None:
    async def test() -> None:
        dense = FakeDense(lambda submit: [5] * submit.spec.max_tokens, step_s=0.001, vocab_size=500)
        options = "--num-prompts=5 --input-len=9 --output-len=4 --len-distribution=constant --request-rate=50,inf"
        options += " --goodput ttft:60000 tpot:60000"
        path = f"--save-result={tmp_path}/result.json"
        async with running_gateway(tmp_path, dense) as gateway:
            with terminal(num_columns=120) as screen:
                command = [sys.executable, "-m", "bench.serving", *reaching(gateway, "grpc"), *options.split(), path]
                done = await asyncio.to_thread(
                    subprocess.run, command, stdout=subprocess.PIPE, stderr=screen.file, text=True, timeout=60.0
                )
                shown = "\n".join(screen.lines())
        assert done.returncode == 0, shown
        assert re.search(r"50 requests/s: 5/5 \|█+\| .* 0 in flight", shown), shown
        assert re.search(r"all at once: 5/5 \|█+\|", shown), shown
        rows = [line.split() for line in done.stdout.splitlines()[-2:]]
        assert [(row[0], row[-1]) for row in rows] == [("50", "0"), ("inf", "0")]
        for row, rate in zip(rows, ("50", "inf"), strict=True):
            saved = json.loads((tmp_path / f"result-{rate}qps.json").read_text())
            assert str(saved["request_rate"]) in (rate, f"{rate}.0")
            assert saved["output_lens"] == [4] * 5 and saved["input_lens"] == [9] * 5
            assert float(row[2]) == pytest.approx(saved["request_goodput"], rel=1e-4), "all are that fast"
            assert saved["request_goodput"] == saved["request_throughput"]
            assert float(row[4]) == pytest.approx(saved["median_ttft_ms"], rel=1e-4)

    run(test())


@over_both
def test_failures_are_counted_with_the_first_error_and_the_exit_status(protocol: str, tmp_path: Path) -> None:
    async def test() -> None:
        dense = FakeDense(lambda submit: [5] * submit.spec.max_tokens)
        async with running_gateway(tmp_path, dense) as gateway:
            dense.errors = _RefuseFourth()
            process = ServiceProcess(
                "bench.serving", *reaching(gateway, protocol), "--num-prompts=6", "--output-len=4", "--warmup=0"
            )
            status, stdout, _ = await process.outcome()
        assert status == 1
        lines = [line.split() for line in stdout.splitlines()]
        assert ["Successful", "requests:", "5"] in lines
        assert ["Failed", "requests:", "1"] in lines
        assert f"  the first: {NO_ROOM[protocol]}" in stdout

    run(test())


@over_both
def test_a_failed_warm_up_ends_the_program_before_the_run(protocol: str, tmp_path: Path) -> None:
    async def test() -> None:
        dense = FakeDense(lambda submit: [5] * submit.spec.max_tokens)
        dense.errors = _RefuseFourth()
        async with running_gateway(tmp_path, dense) as gateway:
            options = [*reaching(gateway, protocol), "--warmup=4", "--output-len=4"]
            process = ServiceProcess("bench.serving", *options)
            status, stdout, stderr = await process.outcome()
        assert (status, stdout) == (1, "")
        assert stderr.splitlines()[-1] == f"serving: a warm-up request failed: {NO_ROOM[protocol]}"
        assert len(dense.submits) == 4

    run(test())


class _RefuseFourth(dict[str, tuple[grpc.StatusCode, str]]):
    """Refuses the request whose id ends with "-3": the ids that the program creates end with the index."""

    def __contains__(self, request_id: object) -> bool:
        return str(request_id).endswith("-3")

    def __getitem__(self, request_id: str) -> tuple[grpc.StatusCode, str]:
        return grpc.StatusCode.RESOURCE_EXHAUSTED, "no room"


@pytest.mark.parametrize("prompt", [{"prompt": "Once upon"}, {"prompt_token_ids": {"ids": [5, 0, 7]}}])
def test_the_request_is_the_same_over_http_and_grpc(prompt: dict[str, Any]) -> None:
    sampling = sampling_pb2.SamplingParams(temperature=0.25)
    options = {"max_tokens": 9, "ignore_eos": True, "cache_salt": "salt"}
    message = gateway_pb2.GenerateRequest(request_id="bench-1", sampling=sampling, **options, **prompt)

    async def test() -> None:
        async with open_transport("http", "host:1") as transport:
            body = CompletionRequest.model_validate_json(transport.encode(message))
        limits = Mock(model=Mock(sampling_defaults={}))  # the rest is used only for other options
        assert await completion_messages(body, "bench-1", limits) == [message]
        assert body.stream and body.return_token_ids

    run(test())


@pytest.mark.parametrize(("protocol", "api"), [("grpc", "gRPC"), ("http", "HTTP")])
@pytest.mark.parametrize("address", ["unix:{}/none.sock", "127.0.0.1:1"])
def test_without_a_server_one_sentence_says_what_to_do(
    protocol: str, api: str, address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = address.format(tmp_path)
    assert main(["--protocol", protocol, "--address", address]) == 1
    said = f"nobody answers at {address}: start a server, as `twostroke serve` does, or name its {api} address by"
    assert capsys.readouterr().err == f"serving: {said} --address\n"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (
            httpx2.Response(503, json={"error": {"code": "unavailable", "message": "no dense"}}),
            "503 unavailable: no dense",
        ),
        (httpx2.Response(404, text="<html>"), "404 '<html>'"),
        (httpx2.Response(200, json={"data": [{"id": "m"}]}), "/v1/models is not a gateway's: "),
        (httpx2.Response(200, text="hello"), "/v1/models is not a gateway's: 'hello'"),
    ],
)
def test_another_http_server_is_not_mistaken_for_a_gateway(answer: httpx2.Response, error: str) -> None:
    async def test() -> None:
        server = httpx2.MockTransport(lambda request: answer)
        async with httpx2.AsyncClient(transport=server, base_url="http://server") as client:
            with pytest.raises(RequestError) as caught:
                await HttpTransport(client, "server:1").model_info()
        assert str(caught.value).startswith(error)

    run(test())


@pytest.mark.parametrize(
    "argv",
    [
        ["--protocol", "https"],
        ["--request-rate", "0"],
        ["--num-prompts", "0"],
        ["--len-range-ratio", "1"],
        ["--max-concurrency", "-1"],
        ["--dataset", "data.json"],
        ["--dataset", "data.json", "--tokenizer", ".", "--input-len", "3"],
        ["--json", "/nowhere/at/all.json"],
    ],
)
def test_impossible_options_are_refused_before_the_run(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
