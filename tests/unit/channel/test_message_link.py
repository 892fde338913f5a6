"""Messages between two threads by a Unix socket: whole, in order, bounded in size, and nothing left behind."""

from __future__ import annotations

import errno
import fcntl
import os
import queue
import secrets
import signal
import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from services.channel import message_link, region
from services.channel.message_link import LinkOffer, MessageLink
from services.channel.region import SharedRegion, remove_stale_regions
from services.common.engine_thread import EngineThread
from services.common.errors import PeerError

TEST_LIMIT_S = 30.0
MAX_BYTES = 1 << 20


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In place of /dev/shm, where a server that starts meanwhile would clean up. Names of sockets must be short."""
    with tempfile.TemporaryDirectory(prefix="link-", dir="/tmp") as name:
        for module in (message_link, region):
            monkeypatch.setattr(module, "SHM_DIR", Path(name))
        yield Path(name)


@pytest.fixture
def offer(directory: Path) -> Iterator[LinkOffer]:
    offer = LinkOffer(secrets.randbits(64), 1)
    yield offer
    offer.close()


@pytest.fixture
def ends(offer: LinkOffer) -> Iterator[tuple[MessageLink, MessageLink]]:
    """The two ends of a link."""
    first = MessageLink.connect(offer.name, MAX_BYTES)
    second = offer.accept(MAX_BYTES)
    yield first, second
    first.close()
    second.close()


def fail(error: PeerError) -> None:
    raise error  # in the receiving thread, which pytest turns into a warning


def header(num_bytes: int) -> bytes:
    """What comes in front of a message of so many bytes."""
    return struct.pack("!Id", num_bytes, 0.0)


def test_messages_arrive_whole_and_in_order_in_both_directions(ends: tuple[MessageLink, MessageLink]) -> None:
    messages = [secrets.token_bytes(size) for size in (0, 1, 100, 70_000, MAX_BYTES, 3)]
    for sender, receiver in (ends, ends[::-1]):
        received: queue.Queue[bytes] = queue.Queue()
        receiver.receive(received.put, fail)
        for message in messages:
            sender.send(message)
        assert [received.get(timeout=TEST_LIMIT_S) for _ in messages] == messages


def test_a_thread_that_waits_for_other_things_reads_messages_until_either_end_closes(offer: LinkOffer) -> None:
    thread = EngineThread()
    thread.start()
    for closes in range(2):
        ends = MessageLink.connect(offer.name, MAX_BYTES), offer.accept(MAX_BYTES)
        received: queue.Queue[bytes] = queue.Queue()
        ends[1].receive_by(partial(thread.post, thread.read), received.put, fail)
        messages = [b"one", b"", secrets.token_bytes(100_000)]
        for message in messages:
            ends[0].send(message)
        assert [received.get(timeout=TEST_LIMIT_S) for _ in messages] == messages
        ends[closes].close()
        deadline = time.monotonic() + TEST_LIMIT_S
        while ends[1]._socket.fileno() >= 0:
            assert time.monotonic() < deadline, "the thread closes the socket"
            time.sleep(0.001)
        ends[0].close()
        offer = LinkOffer(secrets.randbits(64), 1)
    offer.close()
    assert thread.stop(TEST_LIMIT_S) and not thread.failure.done()


@pytest.mark.parametrize("num_bytes", [1, 3, 4, 5, 1000])
def test_messages_arrive_whole_however_their_bytes_come(ends: tuple[MessageLink, MessageLink], num_bytes: int) -> None:
    messages = [b"", b"one", secrets.token_bytes(900), b"", b"end"]
    received: queue.Queue[bytes] = queue.Queue()
    ends[1].receive(received.put, fail)
    content = b"".join(header(len(each)) + each for each in messages)
    for start in range(0, len(content), num_bytes):
        ends[0]._socket.sendall(content[start : start + num_bytes])
        time.sleep(0)  # so that not all of it is read at once
    assert [received.get(timeout=TEST_LIMIT_S) for _ in messages] == messages


def test_threads_that_send_at_once_do_not_mix_their_messages(ends: tuple[MessageLink, MessageLink]) -> None:
    received: queue.Queue[bytes] = queue.Queue()
    ends[1].receive(received.put, fail)
    messages = [bytes([number]) * 50_000 for number in range(20)]
    threads = [threading.Thread(target=ends[0].send, args=(message,)) for message in messages]
    for thread in threads:
        thread.start()
    assert sorted(received.get(timeout=TEST_LIMIT_S) for _ in messages) == messages
    for thread in threads:
        thread.join(TEST_LIMIT_S)


def test_an_offer_is_for_one_connection_of_the_same_user(offer: LinkOffer, directory: Path) -> None:
    path = directory / offer.name
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first = MessageLink.connect(offer.name, MAX_BYTES)
    second = offer.accept(MAX_BYTES)
    assert not path.exists()
    with pytest.raises(PeerError, match=str(path)):
        MessageLink.connect(offer.name, MAX_BYTES)
    first.close()
    second.close()


def test_nobody_has_connected(offer: LinkOffer, directory: Path) -> None:
    with pytest.raises(PeerError, match=offer.name):
        offer.accept(MAX_BYTES)
    assert list(directory.iterdir()) == []


def test_nobody_waits_for_a_peer_that_does_not_read_yet(ends: tuple[MessageLink, MessageLink]) -> None:
    """Two engine threads that send before they read: each may wait for the other, with more than the socket holds."""
    messages = [[secrets.token_bytes(MAX_BYTES // 2), b"", b"small", secrets.token_bytes(9)] for _ in ends]
    for end, sent in zip(ends, messages, strict=True):
        for message in sent:
            end.send(message)
    for end, expected in zip(ends, messages[::-1], strict=True):
        received: queue.Queue[bytes] = queue.Queue()
        end.receive(received.put, fail)
        assert [received.get(timeout=TEST_LIMIT_S) for _ in expected] == expected


def test_a_message_says_when_it_was_sent_however_late_it_is_read(ends: tuple[MessageLink, MessageLink]) -> None:
    times = [time.perf_counter()]
    for _ in range(2):
        ends[0].send(b"a plan")
        times.append(time.perf_counter())
    sent: queue.Queue[float] = queue.Queue()
    ends[1].receive(lambda message: sent.put(ends[1].sent_s), fail)
    for before, after in pairwise(times):
        assert before <= sent.get(timeout=TEST_LIMIT_S) <= after


def test_messages_stay_in_order_when_some_have_no_room_at_once(ends: tuple[MessageLink, MessageLink]) -> None:
    received: queue.Queue[bytes] = queue.Queue()
    ends[1].receive(received.put, fail)
    sizes = [3, 400_000, 0, 90_000, 250_000, 1] * 10
    for number, size in enumerate(sizes):
        ends[0].send(bytes([number]) * size)
        time.sleep(1e-4 * (number % 7))  # so that the thread that sends the rest has ended sometimes
    for number, size in enumerate(sizes):
        assert received.get(timeout=TEST_LIMIT_S) == bytes([number]) * size


def test_bytes_that_a_peer_does_not_read_are_bounded(ends: tuple[MessageLink, MessageLink]) -> None:
    with pytest.raises(PeerError, match=rf"has not read \d+ bytes, the limit is {MAX_BYTES}"):
        for _ in range(4):
            ends[0].send(bytes(MAX_BYTES))
    with pytest.raises(PeerError):  # a part of a message may have been sent: nothing can follow it
        ends[0].send(b"next")


@pytest.mark.parametrize("closes", [0, 1], ids=["the sender", "the receiver"])
def test_closing_either_end_ends_the_thread_that_sends_the_rest(
    ends: tuple[MessageLink, MessageLink], closes: int
) -> None:
    before = set(threading.enumerate())
    ends[0].send(bytes(MAX_BYTES))
    [sender] = set(threading.enumerate()) - before
    ends[closes].close()
    sender.join(TEST_LIMIT_S)
    assert not sender.is_alive()
    with pytest.raises(PeerError):
        ends[0].send(b"too late")


def test_a_signal_within_a_message_breaks_it_off_nowhere(ends: tuple[MessageLink, MessageLink]) -> None:
    """A debugger, or a stop and its end, has Linux return what has come so far."""
    received: queue.Queue[bytes] = queue.Queue()
    previous = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        ends[1].receive(received.put, fail)
        thread = ends[1]._receiver
        assert thread is not None and thread.ident is not None
        message = secrets.token_bytes(9)
        content = header(len(message)) + message
        for start, end in ((0, 2), (2, 16), (16, len(content))):
            ends[0]._socket.sendall(content[start:end])
            for _ in range(50):
                signal.pthread_kill(thread.ident, signal.SIGUSR1)
                time.sleep(0.001)
        assert received.get(timeout=TEST_LIMIT_S) == message
    finally:
        ends[0].close()
        signal.signal(signal.SIGUSR1, previous)


def test_a_message_that_is_too_large_is_refused_with_both_numbers(ends: tuple[MessageLink, MessageLink]) -> None:
    with pytest.raises(PeerError, match=rf"{MAX_BYTES + 1} bytes.*{MAX_BYTES}"):
        ends[0].send(bytes(MAX_BYTES + 1))
    received: queue.Queue[bytes] = queue.Queue()
    ends[1].receive(received.put, fail)
    ends[0].send(b"the next one passes")
    assert received.get(timeout=TEST_LIMIT_S) == b"the next one passes"


@pytest.mark.parametrize(
    "content",
    [header(MAX_BYTES + 1), header(9) + b"half", b"\0\0"],
    ids=["too large", "breaks off", "its header breaks off"],
)
def test_a_message_that_cannot_be_read_is_reported_with_the_limit(
    ends: tuple[MessageLink, MessageLink], content: bytes
) -> None:
    received: queue.Queue[bytes] = queue.Queue()
    errors: queue.Queue[PeerError] = queue.Queue()
    ends[1].receive(received.put, errors.put)
    ends[0]._socket.sendall(content)
    ends[0]._socket.shutdown(socket.SHUT_WR)
    with pytest.raises(PeerError, match=f"unreadable: .*, limit {MAX_BYTES} bytes"):
        raise errors.get(timeout=TEST_LIMIT_S)
    assert received.empty() and errors.empty()


@pytest.mark.parametrize("closes", [0, 1], ids=["the sender", "the receiver"])
def test_closing_either_end_ends_the_receiving_thread(ends: tuple[MessageLink, MessageLink], closes: int) -> None:
    errors: queue.Queue[PeerError] = queue.Queue()
    ends[1].receive(lambda message: None, errors.put)
    thread = ends[1]._receiver
    assert thread is not None
    ends[closes].close()
    thread.join(TEST_LIMIT_S)
    assert not thread.is_alive()
    assert errors.empty(), "whoever closes a link says why"
    with pytest.raises(PeerError):
        for _ in range(2):  # the first one may still get into the socket
            ends[0].send(b"too late")


def test_a_socket_of_another_user_is_left_alone(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies without a region where everybody may make files, and nobody may remove those of others."""
    offers = [LinkOffer(secrets.randbits(64), 1) for _ in range(2)]
    unlink = Path.unlink

    def unlink_own(path: Path, missing_ok: bool = False) -> None:
        if path.name == offers[0].name:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        unlink(path, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", unlink_own)
        assert remove_stale_regions() == [offers[1].name]
    assert [path.name for path in directory.iterdir()] == [offers[0].name]
    for each in offers:
        each.close()


def test_sockets_of_killed_processes_are_removed_with_their_regions(directory: Path) -> None:
    """A killed process leaves both, and its region has no lock."""
    epoch, dead_epoch = secrets.randbits(64), secrets.randbits(64)
    living, dead = SharedRegion.create(8192, epoch, 1, 0), SharedRegion.create(8192, dead_epoch, 1, 0)
    offers = LinkOffer(epoch, 1), LinkOffer(dead_epoch, 1)
    fcntl.flock(dead._file, fcntl.LOCK_UN)
    assert set(remove_stale_regions()) == {dead.name, offers[1].name}
    assert {path.name for path in directory.iterdir()} == {living.name, offers[0].name}
    for each in (living, dead, *offers):
        each.close()
