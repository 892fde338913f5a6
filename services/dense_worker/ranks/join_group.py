"""How the ranks of an attachment meet: `RankStore`, where they find one another, and `join_group`."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist

from services.common.rank import Rank
from services.dense_worker.ranks.group import LOOPBACK, GlooGroup, RankGroup, naming_ranks

STORE_TIMEOUT = timedelta(seconds=30)


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


def join_group(device: torch.device, store: RankStore, rank: Rank, timeout_s: float) -> RankGroup:
    """Meets the other ranks, which do the same. Raises `PeerError` if they do not come within the bound."""
    if device.type == "cpu":
        return GlooGroup(store.store, rank, timeout_s)
    from services.dense_worker.ranks.nccl_group import NcclGroup

    torch.cuda.set_device(device)  # of the calling thread
    return NcclGroup(store.store, rank, device, timeout_s)
