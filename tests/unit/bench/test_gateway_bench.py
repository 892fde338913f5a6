"""The clients on bare sockets with bytes cut anywhere, the figures compared with their definitions, and a short run."""

from __future__ import annotations

import itertools
import json
import os
import select
import socket
import statistics
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.gateway import TOKEN_IDS, TOKEN_MARK, main
from bench.load.process_load import children, cpu_s, num_files, resident_bytes
from bench.load.stats import WireRun, gateway_figures
from bench.load.wire_clients import SO_TIMESTAMPNS, GrpcConnection, SseConnection, WireError, receive_with_kernel_time
from services.common.config import EMBEDDED_MODEL
from services.gateway.text.tokenizer import load_tokenizer
from services.pb import gateway_pb2
from tests.support.warm_process import WarmProcess, warm_server

MS = 1_000_000
SECOND = 1_000_000_000


@pytest.fixture
def address() -> Any:
    """The address of a socket that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield host_and_port(server)


def host_and_port(server: socket.socket) -> str:
    host, port = server.getsockname()
    return f"{host}:{port}"


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def grpc_message(num_tokens: int, is_last: bool = False) -> bytes:
    chunk = gateway_pb2.GenerateChunk(text="x" * num_tokens, token_ids=[300] * num_tokens)
    if is_last:
        chunk.finish.SetInParent()
    data = chunk.SerializeToString()
    return b"\0" + len(data).to_bytes(4, "big") + data


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    borders = [0, *sorted(cut % len(data) for cut in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(borders)]


CUTS = st.lists(st.integers(0, 10_000), max_size=12)


@given(CUTS, CUTS)
@settings(deadline=None)
def test_grpc_tokens_are_counted_with_any_frames_and_reads(frame_cuts: list[int], read_cuts: list[int]) -> None:
    messages = grpc_message(1) + grpc_message(70_000) + grpc_message(2, is_last=True)
    data = frame(4, 0, 0, b"") + frame(1, 4, 3, b"headers")
    data += b"".join(frame(0, 0, 3, piece) for piece in pieces_of(messages, frame_cuts))
    data += frame(0, 0, 1, grpc_message(5, is_last=True)) + frame(1, 5, 1, b"trailers") + frame(1, 5, 3, b"trailers")
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = GrpcConnection(host_and_port(server), {7: b"", 9: b""})
        with connection.socket:
            pieces = pieces_of(data, read_cuts)
            assert sum(connection.receive(piece, now) for now, piece in enumerate(pieces)) == 70_008
    first, second = connection.logs
    assert (first.index, sum(first.chunk_num_tokens), first.num_messages, first.is_done) == (7, 5, 1, True)
    assert (second.index, sum(second.chunk_num_tokens), second.num_messages, second.is_done) == (9, 70_003, 3, True)


def test_a_grpc_stream_without_a_finish_is_an_error(address: str) -> None:
    connection = GrpcConnection(address, {0: b""})
    with connection.socket, pytest.raises(WireError, match="without a finish"):
        connection.receive(frame(0, 0, 1, grpc_message(1)) + frame(1, 5, 1, b"trailers"), 0)


@given(CUTS)
@settings(deadline=None)
def test_sse_tokens_are_counted_with_any_reads(cuts: list[int]) -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nX-TTT: T\r\n\r\n"
    data = head + b'data: {"text":" The"}\n\n' * 5 + b'data: {"text":"TwoT"}\n\n' + b"data: [DONE]\n\n"
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = SseConnection(host_and_port(server), 3, "/v1/completions", b"{}", TOKEN_MARK)
        with connection.socket:
            assert sum(connection.receive(piece, now) for now, piece in enumerate(pieces_of(data, cuts))) == 7
    [log] = connection.logs
    assert (sum(log.chunk_num_tokens), log.is_done) == (7, True)


def test_an_sse_error_is_reported(address: str) -> None:
    connection = SseConnection(address, 0, "/v1/completions", b"{}", TOKEN_MARK)
    with connection.socket, pytest.raises(WireError, match="503 Service Unavailable"):
        connection.receive(b"HTTP/1.1 503 Service Unavailable\r\n\r\n{}", 0)


def test_a_late_reader_learns_when_the_kernel_had_the_data() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        reader, _ = server.accept()
        with reader:
            reader.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
            for _ in range(100):  # the kernel begins some time after it was asked to
                start = time.monotonic_ns()
                sender.sendall(b"token")
                select.select([reader], [], [])
                has_come = time.monotonic_ns()
                time.sleep(0.01)
                data, arrival = receive_with_kernel_time(reader)
                assert data == b"token"
                assert start - SECOND < arrival
                if arrival <= has_come:
                    return
    pytest.fail("the time is that of the reader")


def test_each_token_of_the_stub_contains_the_mark_once() -> None:
    backend = load_tokenizer(EMBEDDED_MODEL).hf_tokenizer.backend_tokenizer
    assert [backend.decode([token_id]).encode().count(TOKEN_MARK) for token_id in TOKEN_IDS] == [1] * len(TOKEN_IDS)


def test_figures_are_those_of_the_measured_seconds() -> None:
    run = WireRun(
        start_ns=SECOND,
        end_ns=3 * SECOND,
        cpu_s={"gateway": 0.5, "client": 1.0, "stub": 0.1},
        step_ns=[900 * MS, 1_000 * MS, 2_000 * MS, 2_990 * MS],
        first_step=[0, 1],
        chunk_ns=[[901 * MS, 1_003 * MS, 2_009 * MS, 3_001 * MS], [1_004 * MS, 2_995 * MS]],
        chunk_num_tokens=[[1, 1, 1, 1], [1, 2]],
        num_messages=5,
        is_paced=True,
    )
    figures = gateway_figures(run)
    assert figures.num_tokens == 5  # the first and the last token of the first stream are outside
    assert figures.output_throughput == 2.5
    assert (figures.cpu_us_per_token, figures.tokens_per_cpu_s) == (100_000, 10)
    assert (figures.gateway_cores, figures.client_cores, figures.stub_cores) == (0.25, 0.5, 0.05)
    assert figures.tokens_per_message == 7 / 5
    assert figures.added_ms is not None
    latencies = [3.0, 9.0, 4.0, 995.0, 5.0]
    assert figures.added_ms.mean == pytest.approx(statistics.fmean(latencies))
    assert figures.added_ms.max == 995.0
    assert figures.first_of_step_ms is not None and figures.last_of_step_ms is not None
    assert figures.first_of_step_ms.mean == pytest.approx((3 + 9 + 5) / 3)
    assert figures.last_of_step_ms.mean == pytest.approx((4 + 995 + 5) / 3)


@pytest.fixture
def warm_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway is forked from `tests.support.warm_server`."""

    def start(command: list[str], cwd: Path, stdout: int, stderr: IO[str]) -> WarmProcess:
        return WarmProcess(warm_server(), command, stderr=stderr.fileno())

    fake = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr("bench.gateway.subprocess", fake)


@pytest.mark.usefixtures("warm_gateway")
@pytest.mark.parametrize("pace", [["--no-paced"], ["--no-free"]])
def test_printed_figures_follow_from_the_raw_timestamps(
    pace: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gateway.json"
    options = ["--protocols", "grpc", "--connections", "2", "--duration", "0.5", "--warmup", "0.1", *pace]
    counts = ["--streams", "4"] if pace == ["--no-paced"] else ["--paced-streams", "4", "--pace-ms", "10"]
    assert main([*options, *counts, "--json", str(file)]) == 0
    [row] = capsys.readouterr().out.splitlines()[2:]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    [case] = json.loads(file.read_text())["cases"]
    raw = case["raw"]
    duration_s = (raw["end_ns"] - raw["start_ns"]) / SECOND
    latencies, num_tokens = [], 0
    for first_step, times, token_counts in zip(
        raw["first_step"], raw["chunk_ns"], raw["chunk_num_tokens"], strict=True
    ):
        arrivals = [time for time, count in zip(times, token_counts, strict=True) for _ in range(count)]
        for step, arrival in enumerate(arrivals, first_step):
            if raw["start_ns"] <= arrival < raw["end_ns"]:
                num_tokens += 1
                if step < len(raw["step_ns"]):
                    latencies.append((arrival - raw["step_ns"][step]) / MS)
    assert num_tokens > 4
    assert cells[4] == f"{num_tokens / duration_s:,.0f}"
    gateway_cpu_s = raw["cpu_s"]["gateway"]
    assert cells[5] == f"{1e6 * gateway_cpu_s / num_tokens:.1f}"
    assert cells[6] == (f"{num_tokens / gateway_cpu_s:,.0f}" if gateway_cpu_s else "0")
    total_tokens = sum(map(sum, raw["chunk_num_tokens"]))
    assert cells[7] == f"{total_tokens / raw['num_messages']:.2f}"
    if pace == ["--no-paced"]:
        assert cells[-2:] == ["-", "-"]
        return
    assert min(latencies) > 0, "a token arrived before it was sent"
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    assert cells[-2] == f"{statistics.median(latencies):.2f} / {cuts[98]:.2f}"


def test_cpu_time_memory_and_files_of_a_process_are_read() -> None:
    pid = os.getpid()
    before, files = cpu_s(pid), num_files(pid)
    while cpu_s(pid) < before + 0.05:  # the kernel counts CPU time in units of 10 ms
        sum(range(100_000))
    with open("/dev/null"):
        assert num_files(pid) == files + 1
    assert resident_bytes(pid) > 10_000_000
    assert all(isinstance(child, int) for child in children(pid))
