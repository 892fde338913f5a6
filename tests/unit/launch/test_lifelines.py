"""The launcher's side of the workers' lifelines: abort marks after a death. See also `test_held_weights`."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.channel.region import HEADER_BYTES, SharedRegion, abort_regions_of
from services.common.lifeline import HeldMemory, Lifeline
from services.launch.lifelines import Lifelines

TIMEOUT_S = 30.0
REPOSITORY = Path(__file__).parents[3]
# A worker: it creates a region, or maps one, says so, and waits until it is killed.
WORKER = """
import sys, time
from services.channel.region import HEADER_BYTES, SharedRegion
kind, name, epoch = sys.argv[1], sys.argv[2], int(sys.argv[3])
if kind == "creates":
    region = SharedRegion.create(HEADER_BYTES, epoch, 1, 0)
else:
    region = SharedRegion.open(name, HEADER_BYTES, epoch, 1)
print(region.name, flush=True)
time.sleep(60)
"""


@pytest.fixture
def lifelines() -> Iterator[Lifelines]:
    lines = Lifelines()
    lines.start()
    yield lines
    lines.close()


class Worker:
    """A process with a lifeline."""

    def __init__(self, lifelines: Lifelines, kind: str, name: str, epoch: int) -> None:
        own_end, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its_end:
            self._process = subprocess.Popen(
                [sys.executable, "-c", WORKER, kind, name, str(epoch)],
                cwd=REPOSITORY,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=[its_end.fileno()],
            )
        lifelines.watch(own_end, self._process.pid)
        assert self._process.stdout is not None
        self.region = self._process.stdout.readline().strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


def wait_aborted(region: SharedRegion) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not region.is_aborted:
        assert time.monotonic() < deadline, "the abort mark is not set"
        time.sleep(0.001)


def test_a_dead_worker_of_the_same_id_in_another_container_aborts_nothing() -> None:
    epoch = secrets.randbits(63)
    mine = SharedRegion.create(HEADER_BYTES, epoch, 1, 0)
    command = [sys.executable, "-c", WORKER, "maps", mine.name, str(epoch)]
    for namespace in (["unshare"], ["unshare", "--map-root-user"]):
        elsewhere = [*namespace, "--pid", "--fork", "--kill-child", *command]
        with subprocess.Popen(elsewhere, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            is_possible = worker.stdout.readline().strip() == mine.name
            if is_possible:
                abort_regions_of(1)  # what it is there
            is_aborted = mine.is_aborted
            worker.kill()
        if is_possible:
            break
    mine.close()
    if not is_possible:
        pytest.skip("no process may have a namespace of process ids of its own here")
    assert not is_aborted


def test_the_regions_of_a_dead_worker_are_aborted_and_no_others(lifelines: Lifelines) -> None:
    first, second = secrets.randbits(63), secrets.randbits(63)
    mine = SharedRegion.create(HEADER_BYTES, first, 1, 0)
    other = SharedRegion.create(HEADER_BYTES, second, 1, 0)
    peer = Worker(lifelines, "maps", mine.name, first)
    try:
        assert not mine.is_aborted
        peer.kill()
        wait_aborted(mine)
        assert not other.is_aborted
    finally:
        mine.close()
        other.close()


def test_the_region_of_a_dead_creator_is_aborted(lifelines: Lifelines) -> None:
    epoch = secrets.randbits(63)
    creator = Worker(lifelines, "creates", "-", epoch)
    region = SharedRegion.open(creator.region, HEADER_BYTES, epoch, 1)
    path = Path("/dev/shm") / creator.region
    try:
        creator.kill()
        wait_aborted(region)
    finally:
        region.close()
        path.unlink(missing_ok=True)  # a server that starts meanwhile removes it


def test_regions_of_two_workers_that_die_at_once_are_aborted(lifelines: Lifelines) -> None:
    """Then nobody else would end the waits that they have left on a GPU."""
    epoch = secrets.randbits(63)
    creator = Worker(lifelines, "creates", "-", epoch)
    region = SharedRegion.open(creator.region, HEADER_BYTES, epoch, 1)
    peer = Worker(lifelines, "maps", creator.region, epoch)  # takes the place of this process in the region
    path = Path("/dev/shm") / creator.region
    try:
        creator.kill()
        peer.kill()
        wait_aborted(region)
    finally:
        region.close()
        path.unlink(missing_ok=True)  # a server that starts meanwhile removes it


def test_memory_that_is_held_anew_takes_the_place_of_what_has_the_same_key(lifelines: Lifelines) -> None:
    own_end, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lifelines.watch(own_end, os.getpid())
    lifeline, names = Lifeline(its_end.detach()), [f"held-{secrets.token_hex(8)}" for _ in range(2)]
    for num_bytes, name in enumerate(names, 1):
        memory = HeldMemory(os.memfd_create(name), num_bytes, 0)
        lifeline.hold("weights", memory)
        os.close(memory.descriptor)
    found = lifeline.ask("weights")  # answered after all that was sent before
    assert found is not None and found.num_bytes == 2
    os.close(found.descriptor)
    files = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    assert [any(name in file for file in files) for name in names] == [False, True]


def test_a_descriptor_that_is_lost_on_the_way_changes_nothing(lifelines: Lifelines) -> None:
    """The kernel drops it if the launcher has as many files open as it may."""
    own_end, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lifelines.watch(own_end, os.getpid())
    its_end.settimeout(TIMEOUT_S)
    its_end.send(b'{"hold": "k", "num_bytes": 1, "checksum": 0}')
    its_end.send(b'{"ask": "k"}')
    assert its_end.recv(1000) == b"{}"
    its_end.close()


def test_what_is_held_is_given_up_at_the_end() -> None:
    lines = Lifelines()
    lines.start()
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lines.watch(ends[0], os.getpid())
    reader, writer = os.pipe()
    socket.send_fds(ends[1], [b'{"hold": "k", "num_bytes": 1, "checksum": 0}'], [writer])
    os.close(writer)
    ends[1].send(b'{"ask": "k"}')
    _, [copy], _, _ = socket.recv_fds(ends[1], 1000, 1)
    os.close(copy)
    lines.close()
    ends[1].close()
    assert os.read(reader, 1) == b""  # nobody can write any more
    os.close(reader)
