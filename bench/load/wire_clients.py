"""Cheap clients that record when each token arrives: they read gRPC and SSE streams directly from sockets.

A client library costs at least as much per message as the gateway, so on few cores the benchmark would measure the
library. Here one thread reads sockets, counts tokens and records times. It implements only those parts of HTTP/2
(RFC 9113, RFC 7541) and HTTP/1.1 that these streams need, and checks nothing else.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.pb import gateway_pb2

MAX_WINDOW = 2**31 - 1  # bytes: the server never waits for this client's flow control
RECEIVE_BYTES = 1 << 20
SO_TIMESTAMPNS = 35  # Linux; Python has no name for it
CONNECT_TIMEOUT_S = 10.0

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK, _END_STREAM, _END_HEADERS = 0x1, 0x1, 0x4
_INITIAL_WINDOW_SIZE = 4
_FRAME = struct.Struct(">BHBBI")  # length in two parts, type, flags, stream
_GRPC_PREFIX = struct.Struct(">BI")  # compressed, length
_TIMESPEC = struct.Struct("@qq")  # seconds, ns


class WireError(Exception):
    """A stream misbehaved."""


@dataclass(slots=True)
class StreamLog:
    """The arrivals of one stream."""

    index: int  # number of the stream
    chunk_ns: list[int] = field(default_factory=list)  # monotonic clock; one entry per read with tokens
    chunk_num_tokens: list[int] = field(default_factory=list)
    num_messages: int = 0  # gRPC messages or SSE events
    is_done: bool = False


class Connection(Protocol):
    """One connection with its streams."""

    socket: socket.socket
    logs: Sequence[StreamLog]

    def start(self) -> None:
        """Sends the requests."""

    def receive(self, data: bytes, now_ns: int) -> int:
        """Reads the arrived bytes; returns their number of tokens. Raises `WireError`."""


class GrpcConnection:
    """Several `GenerateStream` calls over one HTTP/2 connection."""

    def __init__(self, address: str, requests: dict[int, bytes]) -> None:
        """`requests`: serialized messages by the index of their stream."""
        self.socket = _connect(address)
        self.logs = [StreamLog(index) for index in requests]
        self._messages = list(requests.values())
        self._authority = _host_of(address).encode()
        self._pending = b""  # the incomplete frame
        self._begun = [b""] * len(self.logs)  # the incomplete gRPC message of each stream

    def start(self) -> None:
        settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, MAX_WINDOW)
        frames = [
            _PREFACE,
            _frame(_SETTINGS, 0, 0, settings),
            _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", MAX_WINDOW - 65_535)),
        ]
        headers = _request_headers(self._authority)
        for position, message in enumerate(self._messages):
            stream = 2 * position + 1
            frames.append(_frame(_HEADERS, _END_HEADERS, stream, headers))
            frames.append(_frame(_DATA, _END_STREAM, stream, _GRPC_PREFIX.pack(0, len(message)) + message))
        self.socket.sendall(b"".join(frames))

    def receive(self, data: bytes, now_ns: int) -> int:
        data = self._pending + data
        position, end, num_tokens = 0, len(data), 0
        while end - position >= _FRAME.size:
            high, low, kind, flags, stream = _FRAME.unpack_from(data, position)
            frame_end = position + _FRAME.size + (high << 16 | low)
            if frame_end > end:
                break
            payload = data[position + _FRAME.size : frame_end]
            position = frame_end
            if kind == _DATA:
                num_tokens += self._take(stream >> 1, payload, now_ns)
            elif kind in (_PING, _SETTINGS):
                if not flags & _ACK:
                    self.socket.sendall(_frame(kind, _ACK, 0, payload if kind == _PING else b""))
            elif kind in (_RST_STREAM, _GOAWAY):
                raise WireError(f"the gateway ended stream {stream} with frame {kind}: {payload!r}")
            if kind in (_DATA, _HEADERS) and flags & _END_STREAM and not self.logs[stream >> 1].is_done:
                raise WireError(f"stream {stream} ended without a finish: {payload!r}")
        self._pending = data[position:]
        return num_tokens

    def _take(self, position: int, payload: bytes, now_ns: int) -> int:
        log, data, start, num_tokens = self.logs[position], self._begun[position] + payload, 0, 0
        while len(data) - start >= _GRPC_PREFIX.size:
            _, length = _GRPC_PREFIX.unpack_from(data, start)
            message_end = start + _GRPC_PREFIX.size + length
            if message_end > len(data):
                break
            chunk = gateway_pb2.GenerateChunk.FromString(data[start + _GRPC_PREFIX.size : message_end])
            num_tokens += len(chunk.token_ids)
            log.num_messages += 1
            log.is_done = log.is_done or chunk.HasField("finish")
            start = message_end
        self._begun[position] = data[start:]
        if num_tokens:
            log.chunk_ns.append(now_ns)
            log.chunk_num_tokens.append(num_tokens)
        return num_tokens


class SseConnection:
    """One streamed HTTP request. It counts tokens by `mark`, a byte that each token's text contains once."""

    def __init__(self, address: str, index: int, path: str, body: bytes, mark: bytes) -> None:
        self.socket = _connect(address)
        self.logs = [StreamLog(index)]
        self._request = (
            f"POST {path} HTTP/1.1\r\nHost: {_host_of(address)}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        self._mark = mark
        self._head: bytes | None = b""  # the response's head so far; None: it is complete
        self._tail = b""  # the last bytes, in case an end mark is split

    def start(self) -> None:
        self.socket.sendall(self._request)

    def receive(self, data: bytes, now_ns: int) -> int:
        if self._head is not None:
            head, separator, data = (self._head + data).partition(b"\r\n\r\n")
            if not separator:
                self._head = head
                return 0
            if not head.startswith(b"HTTP/1.1 200"):
                raise WireError(f"the gateway answered {(head + data)!r}")
            self._head = None
        [log] = self.logs
        num_tokens = data.count(self._mark)
        log.num_messages += data.count(b"data: {")  # misses one in thousands, split between two reads
        end = self._tail + data
        log.is_done = log.is_done or b"[DONE]" in end
        self._tail = end[-5:]
        if num_tokens:
            log.chunk_ns.append(now_ns)
            log.chunk_num_tokens.append(num_tokens)
        return num_tokens


def read_streams(
    connections: Sequence[Connection],
    report: Callable[[int], None] | None,
    stop: int,
    on_started: Callable[[], None],
    *,
    has_kernel_times: bool = False,
) -> None:
    """Starts all requests and reads until all streams are done or the file descriptor `stop` is readable.

    `report(num_tokens)` is called after each round over the readable sockets; `on_started` when each
    stream has had a token. `has_kernel_times`: what arrives by TCP has the time at which the kernel had it, not that at
    which it is read. Raises `WireError`.
    """
    by_file = {connection.socket.fileno(): connection for connection in connections}
    waiting = {id(log) for connection in connections for log in connection.logs}  # streams without a token so far
    receive = _receive
    if has_kernel_times:
        receive = receive_with_kernel_time
        for connection in connections:
            connection.socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    poll = select.epoll()
    for file in (stop, *by_file):
        poll.register(file, select.EPOLLIN)
    for connection in connections:
        connection.start()
    while by_file:
        num_tokens = 0
        for file, _ in poll.poll():
            if file == stop:
                return
            connection = by_file[file]
            data, now_ns = receive(connection.socket)
            num_tokens += connection.receive(data, now_ns)
            if waiting:
                waiting.difference_update([id(log) for log in connection.logs if log.chunk_ns])
                if not waiting:
                    on_started()
            if not data and not all(log.is_done for log in connection.logs):
                raise WireError(f"the gateway broke the connection of stream {connection.logs[0].index}")
            if not data or all(log.is_done for log in connection.logs):
                poll.unregister(file)
                del by_file[file]
        if num_tokens and report is not None:
            report(num_tokens)


def receive_with_kernel_time(connected: socket.socket) -> tuple[bytes, int]:
    """What has come by a TCP socket with `SO_TIMESTAMPNS`, and when the kernel had the last of it (monotonic clock)."""
    data, control, _, _ = connected.recvmsg(RECEIVE_BYTES, socket.CMSG_SPACE(_TIMESPEC.size))
    now_ns = time.monotonic_ns()
    if not control:  # the end of the stream, or the kernel has just begun with it
        return data, now_ns
    seconds, nanoseconds = _TIMESPEC.unpack(control[0][2])
    return data, now_ns - (time.time_ns() - (seconds * 1_000_000_000 + nanoseconds))


def _receive(connected: socket.socket) -> tuple[bytes, int]:
    data = connected.recv(RECEIVE_BYTES)
    return data, time.monotonic_ns()


def _connect(address: str) -> socket.socket:
    """`address` is unix:PATH or HOST:PORT."""
    if address.startswith("unix:"):
        connected = socket.socket(socket.AF_UNIX)
        connected.settimeout(CONNECT_TIMEOUT_S)
        connected.connect(address.removeprefix("unix:"))
        return connected
    host, _, port = address.rpartition(":")
    connected = socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected


def _host_of(address: str) -> str:
    return "localhost" if address.startswith("unix:") else address


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    length = len(payload)
    return _FRAME.pack(length >> 16, length & 0xFFFF, kind, flags, stream) + payload


def _request_headers(authority: bytes) -> bytes:
    """The headers of a gRPC request in HPACK: names from the static table, values as literals without indexing."""
    path = b"/%s/GenerateStream" % gateway_pb2.DESCRIPTOR.services_by_name["Gateway"].full_name.encode()
    return b"".join(
        (
            b"\x83",  # :method POST
            b"\x86",  # :scheme http
            b"\x04" + _literal(path),  # :path
            b"\x01" + _literal(authority),  # :authority
            b"\x0f\x10" + _literal(b"application/grpc"),  # content-type
            b"\x00" + _literal(b"te") + _literal(b"trailers"),
        )
    )


def _literal(text: bytes) -> bytes:
    assert len(text) < 127, "longer strings need a length of several bytes"
    return bytes([len(text)]) + text
