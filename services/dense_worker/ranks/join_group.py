"""How the ranks of an attachment meet: `RankStore`, where they find one another and meet, and `join_groups`."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist

from services.common.errors import PeerError
from services.common.rank import Rank
from services.dense_worker.ranks.group import LOOPBACK, GlooGroup, RankGroup, naming_ranks

STORE_TIMEOUT = timedelta(seconds=30)
_POLL_S = 0.01
_MET, _FAILED = "met", "failed"  # keys that the first rank sets


@dataclass(frozen=True, slots=True)
class RankStore:
    """Where the ranks of one attachment find one another: kept by the first rank, at a port of loopback."""

    store: dist.Store
    port: int

    @classmethod
    def create(cls) -> Self:
        """The first rank's end."""
        # Of itself the store would listen on all interfaces, and it asks nobody who he is.
        with socket.create_server((LOOPBACK, 0)) as listener:
            port = listener.getsockname()[1]
            store = dist.TCPStore(
                LOOPBACK,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=STORE_TIMEOUT,
                master_listen_fd=listener.detach(),
            )
        return cls(store, port)

    @classmethod
    def find(cls, port: int) -> Self:
        """The end of another rank. Raises `PeerError` if nobody keeps it."""
        with naming_ranks():
            return cls(dist.TCPStore(LOOPBACK, port, is_master=False, timeout=STORE_TIMEOUT), port)

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
        """Ends the meeting on all ranks, if they have not met: one cannot come. For the first rank, from any thread."""
        self.store.set(_FAILED, reason)

    def _wait(self, keys: list[str], timeout_s: float, who: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.store.check(keys):
            if self.store.check([_FAILED]):
                raise PeerError(f"the ranks do not meet: {self.store.get(_FAILED).decode()}")
            if time.monotonic() > deadline:
                raise PeerError(f"{who} has not come within {timeout_s:g} s")
            time.sleep(_POLL_S)


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
