"""The load generators against the real cluster: what they print follows from what they save."""

from __future__ import annotations

import importlib.util
import json
import statistics
from pathlib import Path
from unittest.mock import Mock

import pytest
import uvloop

from bench import core, end_to_end, serving
from bench.load import dense_load
from bench.load.dense_load import DenseLoad, DenseRequest, open_dense
from services.pb import dense_pb2, sampling_pb2, sequence_pb2
from tests.support.cluster import Cluster

SECOND = 1_000_000_000
MS = 1_000_000


def addresses(cluster: Cluster) -> dict[str, str]:
    directory = cluster.log_file.parent
    return {name: f"unix:{directory}/{name}.sock" for name in ("gateway", "dense")}


def table_of(printed: str) -> dict[str, float]:
    rows = [line.strip("|").split("|") for line in printed.splitlines() if line.startswith("| ")]
    return {label.strip(): float(value) for label, value in rows[1:]}


def test_the_core_table_follows_from_the_saved_timestamps(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, plot = tmp_path / "core.json", tmp_path / "core.png"
    options = ["-u", addresses(cluster)["dense"], "-i", "grpc", "--request_rate", "40", "--warmup", "2"]
    source = ["token_norm_dist", "--num_requests", "24", "--input_mean", "20", "--input_stdev", "4"]
    has_plot = importlib.util.find_spec("matplotlib") is not None
    outputs = ["--json", str(file), *(["--plot", str(plot)] if has_plot else [])]
    assert core.main([*options, *outputs, *source, "--output_mean", "10", "--output_stdev", "2"]) == 0
    table = table_of(capsys.readouterr().out)
    document = json.loads(file.read_text())
    requests = document["requests"]
    assert len(requests) == 24
    latencies = [(each["end_ns"] - each["send_ns"]) / MS for each in requests]
    span_s = (max(each["end_ns"] for each in requests) - min(each["send_ns"] for each in requests)) / SECOND
    num_tokens = sum(len(each["chunk_ns"]) for each in requests)
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    assert table == pytest.approx(
        {
            "Requests/Sec": 24 / span_s,
            "OP tokens/sec": num_tokens / span_s,
            "Avg. latency (ms)": statistics.fmean(latencies),
            "P99 latency (ms)": cuts[98],
            "P90 latency (ms)": cuts[89],
            "Avg. IP tokens per request": sum(each["num_prompt_tokens"] for each in requests) / 24,
            "Avg. OP tokens per request": num_tokens / 24,
            "Total latency (ms)": 1e3 * span_s,
            "Total requests": 24,
        },
        abs=0.00501,  # printed with two decimals
    )
    assert all(each["send_ns"] >= each["scheduled_ns"] for each in requests), "a request was sent early"
    assert statistics.fmean(each["num_prompt_tokens"] for each in requests) == pytest.approx(20, abs=4)
    if has_plot:
        assert plot.read_bytes().startswith(b"\x89PNG")


def test_core_takes_prompts_and_lengths_from_a_file(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset, file = tmp_path / "data.json", tmp_path / "core.json"
    items = [
        {"input": "The two strokes of the engine are", "output": "dense and attention, one after the other"},
        {"conversations": [{"value": "San Francisco is a city in"}, {"value": "Northern California that is known"}]},
    ]
    dataset.write_text(json.dumps(items))
    options = ["-u", addresses(cluster)["dense"], "--arrivals", "constant", "--request-rate", "10", "--warmup", "0"]
    source = ["dataset", "--dataset", str(dataset), "--num-requests", "2"]
    assert core.main([*options, "--json", str(file), *source]) == 0
    document = json.loads(file.read_text())
    assert [each["scheduled_ns"] for each in document["requests"]] == [0, 100_000_000]
    assert all(each["num_prompt_tokens"] > 4 and len(each["chunk_ns"]) > 4 for each in document["requests"])
    assert core.main([*options, "dataset", "--dataset", str(dataset), "--num-requests", "3"]) == 1
    assert "2 usable conversations, 3 were asked for" in capsys.readouterr().err


@pytest.mark.parametrize("has_socket", [True, False])
def test_the_dense_worker_and_the_gateway_give_the_same_tokens(
    cluster: Cluster, has_socket: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_by_socket = Mock(wraps=dense_load._send_by_socket)
    monkeypatch.setattr(dense_load, "_send_by_socket", send_by_socket)
    if not has_socket:
        monkeypatch.setattr(dense_load, "read_offer", lambda metadata: None)
    prompt = [5, 6, 7, 8, 9, 300]
    expected = cluster.generate(prompt, 12, ignore_eos=True).token_ids

    async def run() -> list[list[int]]:
        async with open_dense(addresses(cluster)["dense"]) as channel:
            load = DenseLoad(channel, temperature=0.0, cache_salt="")
            records, token_ids = await load.replay([DenseRequest(prompt, 12, 0.0)] * 5, 2, 60.0)
        assert [record.index for record in records] == [0, 1, 2, 3, 4]
        running = [(record.send_ns, record.end_ns) for record in records]
        for send_ns, _ in running:
            assert sum(start <= send_ns < end for start, end in running) <= 2, "more than two ran at a time"
        return token_ids

    assert uvloop.run(run()) == [expected] * 5
    assert send_by_socket.call_count == (5 if has_socket else 0)


def test_the_three_checks_pass_on_a_sound_server_and_name_what_differs(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where, file = addresses(cluster), tmp_path / "end_to_end.json"
    options = ["--address", where["gateway"], "--dense-address", where["dense"], "--num-prompts", "6", "--warmup", "2"]
    assert end_to_end.main([*options, "--num-functionality", "2", "--output-len", "12", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    requests = json.loads(file.read_text())["requests"]
    span_ms = (max(each["end_ns"] for each in requests) - min(each["send_ns"] for each in requests)) / MS
    assert [line.split(":")[0] for line in printed.splitlines()[:4]] == [
        "Functionality", "Warm-up", "Benchmark", "Total latency",
    ]  # fmt: skip
    assert f"Total latency: {span_ms:.3f} ms" in printed

    async def wrong_text(*_: object) -> str:
        return "something else"

    monkeypatch.setattr(end_to_end, "_decode", wrong_text)
    assert end_to_end.main([*options, "--output-len", "4"]) == 1
    assert "functionality: the whole answer to" in capsys.readouterr().err


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_serving_gets_every_token_it_asks_for_over_either_protocol(
    protocol: str, cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serving.json"
    address = {"grpc": addresses(cluster)["gateway"], "http": cluster.http_address}[protocol]
    options = ["--protocol", protocol, "--address", address, "--num-prompts", "8", "--len-distribution", "constant"]
    assert serving.main([*options, "--input-len", "20", "--output-len", "12", "--json", str(file)]) == 0
    requests = json.loads(file.read_text())["requests"]
    assert [(each["num_prompt_tokens"], sum(each["chunk_num_tokens"])) for each in requests] == [(20, 12)] * 8
    assert "Total generated tokens:                  96" in capsys.readouterr().out.splitlines()


def test_a_gateway_that_leaves_in_mid_stream_does_not_end_the_dense_worker(cluster: Cluster) -> None:
    pid = cluster.pid_of("dense_worker")

    async def leave(load: DenseLoad, stub_call: object) -> None:
        spec = sequence_pb2.SequenceSpec(
            request_id="leaver",
            prompt_token_ids=[5, 6, 7],
            sampling=sampling_pb2.SamplingParams(temperature=0.0, seed=1),
            max_tokens=200,
        )
        submit = dense_pb2.Submit(seq_id=(7 << 40) + id(stub_call) % 2**32, spec=spec)
        call = load._stub.Connect()
        await call.write(dense_pb2.GatewayMessage(submit=submit))
        await call.read()
        call.cancel()

    async def run() -> None:
        async with open_dense(addresses(cluster)["dense"]) as channel:
            load = DenseLoad(channel, temperature=0.0, cache_salt="")
            for _ in range(20):
                await leave(load, object())

    uvloop.run(run())
    cluster.wait_idle(60.0)
    assert cluster.pid_of("dense_worker") == pid, "it crashed and was started again"
