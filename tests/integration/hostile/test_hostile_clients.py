"""Clients that are broken, slow, silent, greedy or gone: each is limited, and a normal stream keeps its pace."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from tests.support.clients.http_clients import client, connect_socket, request_bytes
from tests.support.clients.steady_stream import LATE_S, LONG, SteadyStream, wait_until
from tests.support.cluster import Cluster, running_cluster
from tests.support.process_memory import resident_bytes

# The timeouts of waits for a client. The last two are longer than a busy machine stops this process, or the gateway.
LIMITS_S = {"header": 1.5, "keep_alive": 1.5, "body": 3.0, "slow_reader": 4.0}
COMPLETIONS = "/v1/completions"
MAX_CROWDS = 5  # until too many connections are open before the time of the first is over


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    limits = [f"gateway.{name}_timeout_s={limit_s}" for name, limit_s in LIMITS_S.items()]
    directory = tmp_path_factory.mktemp("hostile")
    with running_cluster(directory, *limits, "gateway.max_connections=3000", is_warm=True) as cluster:
        yield cluster
        cluster.wait_idle()


@pytest.fixture(scope="module")
def steady(cluster: Cluster) -> Iterator[SteadyStream]:
    stream = SteadyStream(cluster.http_address)
    yield stream
    stream.stop()


@pytest.fixture(autouse=True)
def keeps_its_pace(cluster: Cluster, steady: SteadyStream) -> Iterator[None]:
    """Checks after each attack that the stream went on, nothing else runs, and the gateway's memory has not grown."""
    gateway = cluster.pid_of("gateway")
    start, resident = time.monotonic(), resident_bytes(gateway)
    yield
    steady.check(start)
    wait_until(lambda: cluster.attention_status().num_sequences <= 1)
    assert cluster.pid_of("gateway") == gateway, "the gateway died"
    assert resident_bytes(gateway) - resident < 128 * 2**20
    assert "Traceback" not in cluster.log_file.read_text()


def read_to_end(bare: socket.socket) -> bytes:
    """Everything until the gateway closes or resets the connection."""
    bare.settimeout(LATE_S)
    data = b""
    with contextlib.suppress(ConnectionError):
        while piece := bare.recv(65536):
            data += piece
    return data


def read_until(bare: socket.socket, end: bytes) -> bytes:
    """Everything up to `end`."""
    bare.settimeout(LATE_S)
    data = b""
    while end not in data:
        piece = bare.recv(65536)
        assert piece, data[-500:]
        data += piece
    return data


def test_prompts_of_megabytes(cluster: Cluster) -> None:
    with client(cluster.http_address) as http:
        headers = {"content-type": "application/json"}
        ten = json.dumps({"prompt": "word " * 2_000_000}).encode()
        assert len(ten) > 10_000_000
        response = http.post(COMPLETIONS, content=ten, headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")

        def chunked() -> Iterator[bytes]:
            for start in range(0, len(ten), 65536):
                yield ten[start : start + 65536]

        with contextlib.suppress(httpx2.WriteError):  # the gateway may close the connection early
            assert http.post(COMPLETIONS, content=chunked(), headers=headers).status_code == 413
        for prompt in ("word " * 400_000, [7] * 390_000, [[7] * 6_000] * 60, ["a"] * 60_000, [[]] * 60_000):
            response = http.post(COMPLETIONS, json={"prompt": prompt})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
        for fields in (
            {"stop": [1] * 390_000},
            {"bad_words": [1] * 390_000},
            {"stop_token_ids": ["a"] * 60_000},
            {"logit_bias": {str(i): "x" for i in range(30_000)}},
            {f"unknown{i}": i for i in range(50_000)},
        ):
            assert http.post(COMPLETIONS, json={"prompt": "a", **fields}).status_code == 400
        chat = {"messages": [{"role": "user", "content": "a"}] * 10_000}
        assert http.post("/v1/chat/completions", json=chat).status_code == 400
        assert http.post("/tokenize", json={"prompt": "word " * 400_000}).status_code == 400
        assert http.post("/detokenize", json={"tokens": [70] * 390_000}).status_code == 400
        for too_many in ([7] * 600_000, [[7] * 10_000] * 60, ["a"] * 400_000, [[]] * 500_000):
            response = http.post(COMPLETIONS, json={"prompt": too_many})
            assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


def test_a_client_that_disconnects_at_any_byte(cluster: Cluster) -> None:
    data = request_bytes(COMPLETIONS, LONG)
    for num_bytes in range(0, len(data) + 1, 3):
        with connect_socket(cluster.http_address) as bare:
            bare.sendall(data[:num_bytes])
    for num_bytes in (1, 17, 200, 1000, 5000):  # read from the answer
        with connect_socket(cluster.http_address) as bare:
            bare.sendall(data)
            received = b""
            while len(received) < num_bytes:
                received += bare.recv(num_bytes - len(received))
            assert b"HTTP/1.1 200 OK"[:num_bytes] in received


def never_read(cluster: Cluster) -> None:
    greedy = {**LONG, "n": 8, "max_tokens": 1200, "logprobs": 20}
    with connect_socket(cluster.http_address) as bare:
        bare.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        bare.sendall(request_bytes(COMPLETIONS, greedy, {"x-request-id": "never-reads"}))
        wait_until(lambda: cluster.attention_status().num_sequences > 1)
        wait_until(lambda: cluster.attention_status().num_sequences <= 1)
        wait_until(lambda: "does not read" in cluster.log_file.read_text())
        assert b"[DONE]" not in read_to_end(bare)


def open_halves(cluster: Cluster) -> None:
    data = request_bytes(COMPLETIONS, LONG | {"stream": False})
    end_of_headers = data.index(b"\r\n\r\n") + 4
    partial = [b"", b"PO", data[:40], data[: end_of_headers - 2], data[:end_of_headers], data[:-1]]
    headers = b"host: a\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    chunked = b"POST /tokenize HTTP/1.1\r\n" + headers + b"5\r\n{"
    kept_alive = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
    start = time.monotonic()
    bares = []
    for prefix in (*partial, chunked, kept_alive, kept_alive + b"GET /hea"):
        bare = connect_socket(cluster.http_address)
        bare.sendall(prefix)
        bares.append(bare)
    for bare in bares:
        answer = read_to_end(bare)
        is_idle = answer.count(b'{"status":"ok"}') == 1  # it got its answer and asked nothing more
        assert is_idle or b'"code":"request_timeout"' in answer
        assert answer.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 408 "))
        bare.close()
    assert time.monotonic() - start > max(LIMITS_S["header"], LIMITS_S["body"]) * 0.9


def send_headers_byte_by_byte(cluster: Cluster) -> None:
    send_slowly(cluster, request_bytes(COMPLETIONS, LONG), 1)


def send_body_byte_by_byte(cluster: Cluster) -> None:
    data = request_bytes(COMPLETIONS, LONG)
    send_slowly(cluster, data, data.index(b"\r\n\r\n") + 4)


def send_slowly(cluster: Cluster, data: bytes, num_at_once: int) -> None:
    with connect_socket(cluster.http_address) as bare:
        bare.sendall(data[:num_at_once])
        begin = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for value in data[num_at_once:]:
                bare.sendall(bytes([value]))
                time.sleep(0.05)
                assert time.monotonic() - begin < LATE_S
        assert b"200 OK" not in read_to_end(bare)


def send_no_http(cluster: Cluster) -> None:
    for garbage in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x00" * 1000,
        b"GET /health HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999999999999999\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /tokenize HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nx-request-id: \xff\xfe\r\n\r\n",
        b"GET //\xff HTTP/1.1\r\n\r\n",
    ):
        with connect_socket(cluster.http_address) as bare:
            bare.sendall(garbage)
            answer = read_to_end(bare)
            assert answer == b"" or answer.split()[1].startswith(b"4"), (garbage[:80], answer[:200])


SLOW = (never_read, open_halves, send_headers_byte_by_byte, send_body_byte_by_byte, send_no_http)


def test_clients_that_let_the_gateway_wait_are_cut(cluster: Cluster) -> None:
    """All at once, because each takes as long as the gateway waits."""
    with ThreadPoolExecutor(len(SLOW)) as threads:
        for attack in [threads.submit(attack, cluster) for attack in SLOW]:
            attack.result()


def test_endless_headers(cluster: Cluster) -> None:
    for endless in (b"GET /" + b"a" * 10_000, b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 2000, b"GET / HTTP/1.1\r\nx: "):
        with connect_socket(cluster.http_address) as bare, contextlib.suppress(ConnectionError):
            bare.sendall(endless)
            for _ in range(2000):
                bare.sendall(b"y" * 1000)
            raise AssertionError("two megabytes of headers were taken")
    with connect_socket(cluster.http_address) as bare:
        bare.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 40_000 + b"\r\n\r\n")
        answer = read_to_end(bare)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"


CHUNKED = b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
BODY = b'{"prompt": "a"}'
CHUNK = b"%x\r\n%b\r\n" % (len(BODY), BODY)


@pytest.mark.parametrize(
    ("start", "endless"),
    [
        (CHUNKED + CHUNK + b"0\r\nx: ", b"y" * 1000),
        (CHUNKED + CHUNK + b"0\r\n", b"x: y\r\n" * 200),
        (CHUNKED + b"1;", b"y" * 1000),
    ],
    ids=["trailer", "trailers", "chunk extension"],
)
def test_endless_frames_around_a_body(cluster: Cluster, start: bytes, endless: bytes) -> None:
    with connect_socket(cluster.http_address) as bare:
        with contextlib.suppress(ConnectionError):
            bare.sendall(start)
            for _ in range(2000):
                bare.sendall(endless)
            raise AssertionError("two megabytes around a body were taken")
        # A reset may discard the answer.
        answer = read_to_end(bare)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 431 "), answer


def test_small_chunks_and_a_trailer_are_read_but_a_trailer_is_not_used_as_a_header(cluster: Cluster) -> None:
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY.replace(b"a", b"word " * 1000))
    with connect_socket(cluster.http_address) as bare:
        bare.sendall(CHUNKED + chunks + b"0\r\nx-request-id: trailer\r\n\r\nGET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        answers = read_until(bare, b'{"status":"ok"}')
        assert answers.startswith(b"HTTP/1.1 200 ")
        assert b"trailer" not in answers


def test_a_thousand_requests_at_once_on_one_connection(cluster: Cluster) -> None:
    with connect_socket(cluster.http_address) as bare:
        bare.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n" * 1000)
        data = b""
        bare.settimeout(LATE_S)
        while data.count(b'{"status":"ok"}') < 1000:
            piece = bare.recv(65536)
            assert piece, data[-500:]
            data += piece


def test_two_thousand_idle_connections(cluster: Cluster, steady: SteadyStream) -> None:
    start = time.monotonic()
    bares = [connect_socket(cluster.http_address) for _ in range(2000)]
    try:
        with client(cluster.http_address) as http:
            for _ in range(5):
                assert http.get("/health").status_code == 200
                response = http.post(COMPLETIONS, json={"prompt": "Tokyo is", "max_tokens": 3})
                assert response.json()["usage"]["completion_tokens"] == 3
        steady.check(start)
        for bare in bares:
            assert read_to_end(bare).startswith(b"HTTP/1.1 408 ")  # the gateway closes idle connections
    finally:
        for bare in bares:
            bare.close()


def test_too_many_connections(cluster: Cluster) -> None:
    for _ in range(MAX_CROWDS):
        bares = []
        try:
            for _ in range(3100):
                bares.append(connect_socket(cluster.http_address))
            refused = read_to_end(bares[-1])
        finally:
            for bare in bares:
                bare.close()
        if not refused.startswith(b"HTTP/1.1 408 "):
            break
    assert refused == b"" or refused.startswith(b"HTTP/1.1 503 ")

    def is_open_again() -> bool:
        with client(cluster.http_address) as http:
            return http.get("/health").status_code == 200

    wait_until(is_open_again)
