"""`NcclGroup` beside an abort. NCCL itself is played: its abort ends when no graph has operations any more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.common.errors import PeerError
from services.common.rank import Rank
from services.dense_worker.ranks import nccl_group
from services.dense_worker.ranks.nccl_group import NcclGroup

LIMIT_S = 10.0


class Nccl:
    """`ProcessGroupNCCL` with the lock of its communicator: `abort` has it until `is_released` is set."""

    Options = SimpleNamespace

    def __init__(self, *arguments: object) -> None:
        self._lock = threading.Lock()
        self.num_operations = 0
        self.is_released, self.has_ended = threading.Event(), threading.Event()
        self.before: Callable[[], object] = lambda: None  # an operation ends

    def allreduce(self, *arguments: object) -> None:
        with self._lock:
            self.num_operations += 1
        self.before()

    broadcast = _allgather_base = send = recv = allreduce

    def abort(self) -> None:
        with self._lock:
            self.is_released.wait(LIMIT_S)
        self.has_ended.set()


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> NcclGroup:
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(nccl_group.dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(nccl_group, "_warn_of_slow_links", lambda rank, device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    store: Any = None
    return NcclGroup(store, Rank(0, 2), torch.device("cpu"), LIMIT_S)


@pytest.mark.parametrize("name", ["add", "broadcast", "gather", "send", "receive"])
def test_an_operation_after_an_abort_does_not_wait_for_its_end(group: NcclGroup, name: str) -> None:
    """The abort waits for graphs of the thread that would enqueue the operation."""
    nccl: Any = group._group
    rows, other = torch.zeros(2, 3), (1,) if name in ("send", "receive") else ()
    operation = getattr(group, name)
    operation(rows, *other)
    group.abort()
    errors = list[BaseException]()

    def run() -> None:
        try:
            operation(rows, *other)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_S / 2)
    is_stuck = thread.is_alive()
    nccl.is_released.set()
    assert not is_stuck
    assert [type(error) for error in errors] == [PeerError] and "given up" in str(errors[0])
    assert nccl.has_ended.wait(LIMIT_S), "the group itself was aborted"
    assert nccl.num_operations == 2, "the first one when the ranks met"


def test_an_abort_comes_after_the_operation_that_is_being_enqueued(group: NcclGroup) -> None:
    nccl: Any = group._group
    nccl.is_released.set()
    nccl.before = lambda: (group.abort(), has_ended.append(nccl.has_ended.wait(0.1)))
    has_ended = list[bool]()
    group.add(torch.zeros(1))
    assert has_ended == [False]
    assert nccl.has_ended.wait(LIMIT_S)


def test_an_abort_does_not_wait_long_for_an_operation_that_the_device_has_no_room_for(group: NcclGroup) -> None:
    """It waits for other ranks, which only the abort can end."""
    nccl: Any = group._group
    nccl.is_released.set()
    nccl.before = lambda: (group.abort(), has_ended.append(nccl.has_ended.wait(LIMIT_S)))
    has_ended = list[bool]()
    group.add(torch.zeros(1))
    assert has_ended == [True]
