"""`RankGroup`: what the ranks compute together. It lives as long as an attachment; a broken one is never used again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from services.common.errors import PeerError
from services.common.rank import Rank

LOOPBACK = "127.0.0.1"
_TAG = 0  # of all that one rank sends to another: their order says what is what


class RankGroup(Protocol):
    """What ranks exchange in a step. All ranks call `add`, `broadcast` and `gather` in the same order, with tensors of
    the same shapes; `send` and `receive` are for two of them.

    All raise `PeerError` if a rank is gone, or does not come within the group's bound.
    """

    rank: Rank
    is_waiting: bool  # whether a thread is in an operation now; always False on CUDA, where the host does not wait

    def add(self, tensor: torch.Tensor) -> None:
        """Makes each rank's tensor the sum of all, in place. All ranks get the same bits."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Makes each rank's tensor that of the first rank, in place."""

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """tensor [n, size] -> on the first rank those of all ranks side by side, [n, num_ranks * size].

        On other ranks the result has no meaning.
        """

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Gives a tensor to the rank with this number, which receives it."""

    def receive(self, tensor: torch.Tensor, sender: int) -> None:
        """Fills a tensor with what the rank with this number sends, in the order in which it does."""

    def begin_receive(self, tensor: torch.Tensor, sender: int) -> Callable[[], None]:
        """As `receive`, which ends when what is returned has been called: until then it waits for nothing."""

    def capturing(self) -> AbstractContextManager[None]:
        """A context in which a CUDA graph with operations is captured: an abort takes effect at its end."""

    def abort(self) -> None:
        """Releases whoever waits in it, here and on other ranks. May be called from any thread, also twice."""


class GlooGroup:
    """A `RankGroup` of processes of one machine, on CPUs, by gloo over loopback.

    Gloo interrupts an operation only where a connection is closed. So `abort` closes this rank's connections, unless it
    is in an operation itself: at least one rank is not, or all would be done. They are closed when nobody refers to
    them: an error of an operation lives on, and with it the frames that it came through, which must not. Nor must who
    has begun to receive, and may never come to the end.
    """

    def __init__(self, store: dist.Store, rank: Rank, timeout_s: float) -> None:
        """Waits for all ranks, at most `timeout_s`, which also bounds each later operation. Raises `PeerError`."""
        self.rank = rank
        self._is_aborted = False
        self._in_use = threading.Lock()  # held during an operation, and while the connections are closed
        self._begun: dict[object, dist.Work] = {}  # what is received, until its end is waited for
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        with naming_ranks():
            self._group: dist.ProcessGroupGloo | None = dist.ProcessGroupGloo(store, rank.index, rank.count, options)

    @property
    def is_waiting(self) -> bool:
        """Whether a thread is in an operation."""
        return self._in_use.locked()

    def add(self, tensor: torch.Tensor) -> None:
        """The engine thread waits for it."""
        with self._operation():
            self._connected.allreduce(tensor).wait()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """The engine thread waits for it."""
        with self._operation():
            self._connected.broadcast(tensor, 0).wait()

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The engine thread waits for it."""
        is_first = self.rank.index == 0
        parts = [torch.empty_like(tensor) for _ in range(self.rank.count)] if is_first else []
        with self._operation():
            self._connected.gather(parts, tensor, 0).wait()
        return torch.cat(parts, dim=1) if is_first else tensor

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """The engine thread waits until the connection has taken it."""
        with self._operation():
            self._connected.send([tensor], to, _TAG).wait()

    def receive(self, tensor: torch.Tensor, sender: int) -> None:
        """The engine thread waits for it."""
        self.begin_receive(tensor, sender)()

    def begin_receive(self, tensor: torch.Tensor, sender: int) -> Callable[[], None]:
        """The rank that sends it does not wait for the end."""
        key = object()
        with self._operation():
            self._begun[key] = self._connected.recv([tensor], sender, _TAG)

        def end() -> None:
            with self._operation():
                self._begun.pop(key).wait()

        return end

    def capturing(self) -> AbstractContextManager[None]:
        """On CPUs nothing is captured."""
        return nullcontext()

    def abort(self) -> None:
        """Closes the connections, now or at the end of the present operation."""
        self._is_aborted = True
        if self._in_use.acquire(blocking=False):
            self._begun.clear()
            self._group = None
            self._in_use.release()

    @property
    def _connected(self) -> dist.ProcessGroupGloo:
        assert self._group is not None, "it is given up between operations"
        return self._group

    @contextmanager
    def _operation(self) -> Iterator[None]:
        try:
            with self._in_use, naming_ranks():
                if self._is_aborted or self._group is None:
                    raise PeerError("the ranks have parted")
                yield
        finally:
            if self._is_aborted:
                self.abort()


@contextmanager
def naming_ranks() -> Iterator[None]:
    """A context in which errors of a collective operation, of NCCL or gloo, become `PeerError`; no others do."""
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or "gloo" in str(error) or "NCCL" in str(error)):
            raise  # of this rank's device, or a bug
        raise PeerError(f"another rank is gone, or does not answer: {str(error).splitlines()[0]}") from error
