"""`NcclGroup`: a `RankGroup` of GPUs, each rank on its own, by NCCL on the current stream."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import structlog
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

from services.common.errors import PeerError
from services.common.rank import Rank
from services.dense_worker.ranks.group import naming_ranks

log = structlog.get_logger()

# NCCL's own, of the process. An operation that waits too long is found by the engine, which aborts the group; torch's
# watchdogs would end the process instead, also for graphs that wait with reason. Multicast over NVLink stays off.
# All ranks are on one machine, so the meeting needs no interface that others can reach.
SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
}
# How long an abort waits for an operation that is being enqueued, which takes microseconds, or for the capture of a
# graph. If the device has no room for more work, an operation takes as long as other ranks let the device wait.
_ENQUEUING_S = 0.5


class NcclGroup:
    """Operations are enqueued and may be captured; no method but the constructor waits."""

    is_waiting = False

    def __init__(self, store: dist.Store, rank: Rank, device: torch.device, timeout_s: float) -> None:
        """Waits for all ranks, at most `timeout_s`. Raises `PeerError`."""
        os.environ.update(SETTINGS)
        _warn_of_slow_links(rank, device)
        self.rank = rank
        self._is_aborted = False
        self._enqueuing = threading.RLock()  # of the thread that enqueues an operation, or captures some in a graph
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        with naming_ranks():
            self._group = dist.ProcessGroupNCCL(store, rank.index, rank.count, options)
            own = torch.zeros(1, device=device)  # its operation makes the communicator, which no graph can
            if rank.is_stage:
                self._meet_neighbours(own)
            else:
                self.add(own)
            torch.cuda.current_stream(device).synchronize()

    def add(self, tensor: torch.Tensor) -> None:
        """Enqueues it on the current stream."""
        options = AllreduceOptions()
        options.asyncOp = False
        with self._operation():
            _finish(self._group.allreduce([tensor], options))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Enqueues it on the current stream."""
        options = BroadcastOptions()
        options.rootRank, options.asyncOp = 0, False
        with self._operation():
            _finish(self._group.broadcast([tensor], options))

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Enqueues it on the current stream; all ranks get all parts."""
        count, (num_rows, size) = self.rank.count, tensor.shape
        parts = torch.empty(count, num_rows, size, dtype=tensor.dtype, device=tensor.device)
        options = AllgatherOptions()
        options.asyncOp = False
        with self._operation():
            _finish(self._group._allgather_base(parts, tensor, options))
        return parts.transpose(0, 1).reshape(num_rows, count * size)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Enqueues it on the current stream."""
        with self._operation():
            _finish(self._group.send([tensor], to, 0))

    def receive(self, tensor: torch.Tensor, sender: int) -> None:
        """Enqueues it on the current stream."""
        with self._operation():
            _finish(self._group.recv([tensor], sender, 0))

    def begin_receive(self, tensor: torch.Tensor, sender: int) -> Callable[[], None]:
        """Enqueues all of it: later kernels of the stream come after it."""
        self.receive(tensor, sender)
        return _nothing

    def _meet_neighbours(self, tensor: torch.Tensor) -> None:
        """Makes the communicators of two, around the ring of stages."""
        index, count = self.rank.index, self.rank.count
        following, before = (index + 1) % count, (index - 1) % count
        if index:
            self.receive(tensor, before)
        self.send(tensor, following)
        if not index:
            self.receive(tensor, before)

    def abort(self) -> None:
        """Ends the kernels that wait for other ranks, at once. What NCCL does after that may wait for the device."""
        if not self._is_aborted:
            self._is_aborted = True
            threading.Thread(target=self._abort, name="abort of ranks", daemon=True).start()

    def _abort(self) -> None:
        if self._enqueuing.acquire(timeout=_ENQUEUING_S):
            self._enqueuing.release()
        self._group.abort()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """NCCL's abort would make the capture fail, as if the GPU had. The next operation after an abort raises."""
        with self._enqueuing:
            if self._is_aborted:
                raise PeerError("the ranks have been given up")
            yield

    @contextmanager
    def _operation(self) -> Iterator[None]:
        """A context in which an operation is enqueued. Raises `PeerError` after an abort.

        NCCL would let it wait for the end of the abort, which waits until no graph with sums is left. Graphs are the
        thread's that enqueues, which may be capturing one: both would wait for ever.
        """
        with self.capturing(), naming_ranks():
            yield


def _warn_of_slow_links(rank: Rank, device: torch.device) -> None:
    """Rank r is on GPU r. Those that do not reach each other's memory exchange all rows through the host's."""
    others = (index for index in range(rank.count) if index != rank.index)
    slow = [index for index in others if not torch.cuda.can_device_access_peer(device, index)]
    if slow:
        log.warning("GPUs have no direct link: what ranks exchange takes the way through host memory", ranks=slow)


def _nothing() -> None:
    """The host does not wait."""


def _finish(work: dist.Work | None) -> None:
    """Lets the current stream wait for it; there is none if it runs there anyway."""
    if work is not None:
        work.wait()
