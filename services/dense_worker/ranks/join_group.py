"""How the ranks of an attachment meet: `RankStore`, where they find one another and meet, and `join_groups`."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist

from services.common.errors import PeerError
from services.common.rank import Rank
from services.dense_worker.ranks.group import LOOPBACK, GlooGroup, RankGroup, naming_ranks

STORE_TIMEOUT = timedelta(seconds=30)
CONNECT_TIMEOUT = timedelta(seconds=1)  # to the first rank's end, which is there before others are told of it
_CONNECT_TRIES = 5
_POLL_S = 0.01
_MET, _FAILED = "met", "failed"  # keys that the first rank sets


class RankStore:
    """Where the ranks of one attachment find one another: kept by the first rank, at a port of loopback."""

    def __init__(self, store: dist.Store, port: int, kept: dist.Store | None = None) -> None:
        """`store`: a connection, which is busy while a library waits in it. `kept`: the first rank's end has the store.
        """
        self.store, self.port, self._kept = store, port, kept

    @classmethod
    def create(cls) -> Self:
        """The first rank's end, which has the store until `close`."""
        # Of itself the store would listen on all interfaces, and it asks nobody who he is.
        with socket.create_server((LOOPBACK, 0)) as listener:
            port = listener.getsockname()[1]
            kept = dist.TCPStore(
                LOOPBACK,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=STORE_TIMEOUT,
                master_listen_fd=listener.detach(),
            )
        return cls(_connect(port), port, kept)

    @classmethod
    def find(cls, port: int) -> Self:
        """The end of another rank. Raises `PeerError` if nobody keeps it."""
        for left in reversed(range(_CONNECT_TRIES)):
            try:
                socket.create_connection((LOOPBACK, port), CONNECT_TIMEOUT.total_seconds()).close()
            except OSError as error:  # torch's store would try again until its time is over
                raise PeerError(f"the first rank is gone, or does not answer: {error.strerror or error}") from error
            try:
                return cls(_connect(port), port)
            except PeerError:
                if not left:
                    raise
        raise AssertionError("the last try returns or raises")

    def meet(self, rank: Rank, timeout_s: float) -> None:
        """Returns on all ranks when all have come, or raises `PeerError` on all.

        The first rank decides: it waits for at most `timeout_s`, and the others for it, twice as long. Libraries that
        connect the ranks wait without a bound for one that does not come, so this comes before them.
        """
        store = self.store
        with naming_ranks():
            store.set(_here(rank.index), "")
            if rank.index:
                self._wait([_MET], 2 * timeout_s, "the first rank")
                return
            try:
                for index in range(1, rank.count):
                    self._wait([_here(index)], timeout_s, f"rank {index}")
            except PeerError as error:
                self.fail(str(error))
                raise
            store.set(_MET, "")

    def fail(self, reason: str) -> None:
        """Ends the meeting on all ranks, if they have not met: one cannot come. For the first rank, from any thread.

        It waits for nobody, also while a library waits for a rank that has met the others, and has died.
        """
        assert self._kept is not None, "the first rank decides"
        self._kept.set(_FAILED, reason)

    def close(self) -> None:
        """Releases all who wait in the store, here and on other ranks. For the first rank."""
        self._kept = None

    def _wait(self, keys: list[str], timeout_s: float, who: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.store.check(keys):
            if self.store.check([_FAILED]):
                raise PeerError(f"the ranks do not meet: {self.store.get(_FAILED).decode()}")
            if time.monotonic() > deadline:
                raise PeerError(f"{who} has not come within {timeout_s:g} s")
            time.sleep(_POLL_S)


def _connect(port: int) -> dist.Store:
    with naming_ranks():
        store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=CONNECT_TIMEOUT)
        store.set_timeout(STORE_TIMEOUT)
    return store


def _here(index: int) -> str:
    return f"here-{index}"


def join_groups(
    device: torch.device, store: RankStore, rank: Rank, num_lanes: int, timeout_s: float
) -> Sequence[RankGroup]:
    """Meets the other ranks, which do the same. Raises `PeerError` if they do not come within the bound."""
    store.meet(rank, timeout_s)
    return connect_groups(device, store, rank, num_lanes, timeout_s)


def connect_groups(
    device: torch.device, store: RankStore, rank: Rank, num_lanes: int, timeout_s: float
) -> Sequence[RankGroup]:
    """Connects this rank with the others, which it has met, once for each lane: what lanes exchange has no order.

    Raises `PeerError` if one of them goes.
    """
    groups: list[RankGroup] = []
    try:
        for lane in range(num_lanes):
            groups.append(_connect_group(device, dist.PrefixStore(f"lane-{lane}", store.store), rank, timeout_s))
    except BaseException:
        for each in groups:
            each.abort()
        raise
    return groups


def _connect_group(device: torch.device, store: dist.Store, rank: Rank, timeout_s: float) -> RankGroup:
    if device.type == "cpu":
        return GlooGroup(store, rank, timeout_s)
    from services.dense_worker.ranks.nccl_group import NcclGroup

    torch.cuda.set_device(device)  # of the calling thread
    return NcclGroup(store, rank, device, timeout_s)
