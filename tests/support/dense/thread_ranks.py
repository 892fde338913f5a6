"""Ranks that are threads of one process: `run_ranks`, and a `RankGroup` for them."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias, TypeVar

import torch

from services.common.rank import Rank

T = TypeVar("T")
Sent: TypeAlias = dict[tuple[int, int], queue.Queue[torch.Tensor]]  # by sender and receiver
TIMEOUT_S = 20.0


class ThreadGroup:
    """A `RankGroup` of threads. All share `tensors`, a place for each rank, `barrier`, and what is `sent`, by ranks."""

    def __init__(
        self,
        rank: Rank,
        tensors: list[torch.Tensor | None],
        barrier: threading.Barrier,
        sent: Sent,
    ) -> None:
        self.rank = rank
        self._sent = sent
        self.num_calls, self.is_waiting = 0, False
        self._tensors, self._barrier = tensors, barrier

    def add(self, tensor: torch.Tensor) -> None:
        tensor.copy_(sum(self._exchange(tensor)))

    def broadcast(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self._exchange(tensor)[0])

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(tensor), dim=1)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._sent[self.rank.index, to].put(tensor.clone())

    def receive(self, tensor: torch.Tensor, sender: int) -> None:
        sent = self._wait(self._sent[sender, self.rank.index])
        assert (sent.shape, sent.dtype) == (tensor.shape, tensor.dtype), "both ends agree"
        tensor.copy_(sent)

    def begin_receive(self, tensor: torch.Tensor, sender: int) -> Callable[[], None]:
        self.receive(tensor, sender)  # as if the caller's next operation came after it on a GPU
        return lambda: None

    def capturing(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def of_lane(self, sent: Sent) -> ThreadGroup:
        """The same ranks, as another lane meets them; `sent`: by ranks, in that lane."""
        return ThreadGroup(self.rank, self._tensors, self._barrier, sent)

    def _wait(self, sent: queue.Queue[torch.Tensor]) -> torch.Tensor:
        deadline = time.monotonic() + TIMEOUT_S
        while not self._barrier.broken and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                return sent.get(timeout=0.05)
        raise threading.BrokenBarrierError

    def abort(self) -> None:
        self._barrier.abort()

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.num_calls += 1
        self._tensors[self.rank.index] = tensor.clone()
        self._barrier.wait()
        tensors = [each for each in self._tensors if each is not None]
        self._barrier.wait()
        assert len({each.shape for each in tensors}) == 1, "all ranks are in the same operation"
        return tensors


def new_sent(count: int) -> Sent:
    """Made before the threads begin: two of them might make a queue each, and wait for what is in the other one."""
    return {pair: queue.Queue() for pair in itertools.permutations(range(count), 2)}


def run_ranks(count: int, run: Callable[[ThreadGroup], T], *, are_stages: bool = False) -> list[T]:
    """Calls `run` in a thread for each rank, at the same time; returns what they return, in the order of the ranks."""
    tensors, barrier = [None] * count, threading.Barrier(count, timeout=TIMEOUT_S)
    sent = new_sent(count)
    ranks = [Rank(index, count, are_stages) for index in range(count)]
    groups = [ThreadGroup(rank, tensors, barrier, sent) for rank in ranks]

    def guarded(group: ThreadGroup) -> T:
        try:
            return run(group)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as threads:
        futures = [threads.submit(guarded, group) for group in groups]
        errors = [each.exception() for each in futures]
        for error in errors:
            if error is not None and not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [each.result() for each in futures]
