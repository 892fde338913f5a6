"""`Publisher`: sends KV events over ZeroMQ as vLLM does, from a thread of its own.

Messages of the PUB socket have three frames: the topic, a sequence number of 8 bytes (big-endian, from 0 on), and a
batch in msgpack. A batch is an array of a time, events and a rank; an event is a map whose "type" is its name. A ROUTER
socket sends again what is asked for: a request is the first sequence number, the answers are pairs of number and batch,
and the last one has the number -1 and no batch.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice

import structlog

from services.attn_worker.kv_events.kv_events import Cleared, Event, KVEvents, Removed, Stored
from services.common.errors import ConfigError

try:
    import msgspec
    import zmq
except ImportError as error:
    raise ConfigError(
        f"attention.kv_events needs {error.name}, which is not installed: pip install 'twostroke[kv-events]'"
    ) from error

log = structlog.get_logger()

_INTERVAL_MS = 10  # in which events are collected for a batch
_RETRY_S = 0.2  # while a previous worker still has the address
_MAX_TOKENS = 4096  # of a batch, so that packing it keeps the interpreter lock for less than a millisecond
_MESSAGE_TOKENS = 16  # as which the rest of a message counts, about a hundred bytes
MAX_BATCH_BYTES = 2**16  # of one of these, also if each token is in a block of its own
_MAX_UNSENT_BYTES = 256 * 2**20  # for one subscriber that reads too slowly; later batches are lost for it
_MAX_KEPT_BYTES = 64 * 2**20  # of batches that can be sent again
_PORTION = 1024  # batches that are sent again before new ones are published
_STOP_TIMEOUT_S = 2.0
_END = (-1).to_bytes(8, "big", signed=True)
_MEDIUM = "GPU"  # what vLLM calls the memory of the device, whichever that is
_HASH_BYTES = 8  # vLLM's hashes are unsigned integers of 64 bits


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """The fields are vLLM's; all blocks are of the model without an adapter."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """The fields are vLLM's."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, tag=True):
    """It has no fields."""


Message = BlockStored | BlockRemoved | AllBlocksCleared


class Publisher:
    """Call `start`, finally `close`. An endpoint with `*`, `::` or `ipc://` is bound, any other one connected to."""

    def __init__(self, events: KVEvents, endpoint: str, replay_endpoint: str | None, topic: str) -> None:
        self._events = events
        self._endpoints = {"attention.kv_events": endpoint, "attention.kv_events_replay": replay_endpoint}
        self._topic = topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._publishing: zmq.Socket[bytes] | None = None
        self._replaying: zmq.Socket[bytes] | None = None
        self._next_sequence = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._num_kept_bytes = 0
        self._replays: dict[bytes, int] = {}  # by peer, the number of the next batch to be sent again
        self._is_closing = threading.Event()
        self._has_waited = False  # for an address
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    def start(self, *, has_predecessor: bool) -> None:
        """Opens the sockets and starts the thread.

        With a predecessor, which has the addresses as long as it lives, they are opened when there are events, or
        later. Raises `ConfigError` if an endpoint cannot be used.
        """
        if not has_predecessor:
            self._open()
        self._thread.start()

    def close(self) -> None:
        """Sends what has been recorded, and ends."""
        self._is_closing.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_TIMEOUT_S)
        self._context.destroy(linger=100)

    def _run(self) -> None:
        while True:
            is_last = self._is_closing.is_set()
            if self._publishing is None and self._events.num_queued:
                self._open_if_free()
            if self._publishing is not None:
                for batch in _batches(self._events.take()):
                    self._publish(batch)
            if is_last:
                return
            self._wait()

    def _wait(self) -> None:
        """Lets `_INTERVAL_MS` pass, or sends a portion of what peers ask to have again."""
        if self._replaying is None:
            self._is_closing.wait(_INTERVAL_MS / 1e3)
            return
        has_sent = any([self._send_again(peer) for peer in tuple(self._replays)])
        if self._replaying.poll(0 if has_sent else _INTERVAL_MS):
            self._take_request(self._replaying.recv_multipart())

    def _publish(self, messages: Sequence[Message]) -> None:
        assert self._publishing is not None
        payload = self._encoder.encode([time.time(), messages, 0])
        number, self._next_sequence = self._next_sequence, self._next_sequence + 1
        self._publishing.send_multipart([self._topic, number.to_bytes(8, "big"), payload], copy=False)
        if self._replaying is None:
            return
        self._kept.append((number, payload))
        self._num_kept_bytes += len(payload)
        while self._num_kept_bytes > _MAX_KEPT_BYTES:
            self._num_kept_bytes -= len(self._kept.popleft()[1])

    def _take_request(self, request: Sequence[bytes]) -> None:
        """A peer's request takes the place of one that it has not got all answers to."""
        if len(request) != 3 or len(request[2]) != 8:
            log.warning("a request for KV events is not a sequence number", num_frames=len(request))
            return
        self._replays[request[0]] = int.from_bytes(request[2], "big")

    def _send_again(self, peer: bytes) -> bool:
        """Sends a portion, as far as the peer has room for it: this thread never waits. Returns whether it had any.

        What is no longer kept when a slow peer has room is left out, which it sees by the numbers.
        """
        first_kept = self._kept[0][0] if self._kept else self._next_sequence
        start = min(max(0, self._replays[peer] - first_kept), len(self._kept))
        portion = list(islice(self._kept, start, start + _PORTION))
        is_last = start + len(portion) >= len(self._kept)
        num_sent = 0
        try:
            for number, payload in portion:
                self._send_answer(peer, number.to_bytes(8, "big"), payload)
                num_sent += 1
            if is_last:
                self._send_answer(peer, _END, b"")
                del self._replays[peer]
                return True
        except zmq.Again:  # it has no room
            pass
        except zmq.ZMQError:  # it has gone
            del self._replays[peer]
            return False
        self._replays[peer] = first_kept + start + num_sent
        return num_sent > 0

    def _send_answer(self, peer: bytes, number: bytes, payload: bytes) -> None:
        assert self._replaying is not None
        self._replaying.send_multipart([peer, b"", number, payload], zmq.NOBLOCK, copy=False)

    def _open(self) -> None:
        endpoint, replay_endpoint = self._endpoints.values()
        publishing = self._socket("attention.kv_events", zmq.PUB, endpoint, binds=_is_bound(endpoint))
        if replay_endpoint is not None:
            try:
                self._replaying = self._socket("attention.kv_events_replay", zmq.ROUTER, replay_endpoint, binds=True)
                self._replaying.setsockopt(zmq.ROUTER_MANDATORY, 1)  # says that a peer has no room, and drops nothing
            except ConfigError:
                publishing.close(linger=0)
                raise
        self._publishing = publishing
        log.info("KV events", endpoint=endpoint, replay_endpoint=replay_endpoint, topic=self._topic.decode())

    def _open_if_free(self) -> None:
        try:
            self._open()
        except ConfigError as error:  # the worker before this one has not ended yet
            if not self._has_waited:
                log.warning("KV events wait for their address", reason=str(error))
            self._has_waited = True
            self._is_closing.wait(_RETRY_S)

    def _socket(self, key: str, kind: int, endpoint: str | None, *, binds: bool) -> zmq.Socket[bytes]:
        assert endpoint is not None
        socket = self._context.socket(kind)
        socket.set_hwm(_MAX_UNSENT_BYTES // MAX_BATCH_BYTES)  # of messages: ZeroMQ counts no bytes
        try:
            (socket.bind if binds else socket.connect)(endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise ConfigError(f"{key} {endpoint!r} cannot be used: {error.strerror}") from error
        return socket


def _is_bound(endpoint: str | None) -> bool:
    return endpoint is not None and (endpoint.startswith("ipc://") or "*" in endpoint or "::" in endpoint)


def _batches(events: Sequence[Event]) -> list[list[Message]]:
    """The events in vLLM's words, in batches that are packed quickly."""
    batches: list[list[Message]] = []
    num_tokens = _MAX_TOKENS
    for event in events:
        for message, size in _messages(event):
            if num_tokens + size > _MAX_TOKENS:
                batches.append([])
                num_tokens = 0
            batches[-1].append(message)
            num_tokens += size
    return batches


def _messages(event: Event) -> list[tuple[Message, int]]:
    """One event in vLLM's words, each with its size in tokens; a long one in several."""
    if isinstance(event, Cleared):
        return [(AllBlocksCleared(), _MESSAGE_TOKENS)]
    if isinstance(event, Removed):
        return [(BlockRemoved([_hash(event.digest)], _MEDIUM), _MESSAGE_TOKENS)]
    assert isinstance(event, Stored)
    size = event.block_size
    most, parent = max(1, _MAX_TOKENS // size), event.parent
    messages: list[tuple[Message, int]] = []
    for first in range(0, len(event.digests), most):
        digests = event.digests[first : first + most]
        token_ids = event.token_ids[first * size : (first + len(digests)) * size].tolist()
        parent_hash = None if parent is None else _hash(parent)
        hashes = [_hash(digest) for digest in digests]
        message = BlockStored(hashes, parent_hash, token_ids, size, None, _MEDIUM, None)
        messages.append((message, _MESSAGE_TOKENS + len(token_ids)))
        parent = digests[-1]
    return messages


def _hash(digest: bytes) -> int:
    return int.from_bytes(digest[:_HASH_BYTES], "big")
