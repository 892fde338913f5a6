"""Ranks that are threads of one process: `run_ranks`, and a `RankGroup` for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from services.common.rank import Rank

T = TypeVar("T")
TIMEOUT_S = 20.0


class ThreadGroup:
    """A `RankGroup` of threads. `tensors`: a place for each rank, and `barrier`, which all ranks share."""

    def __init__(self, rank: Rank, tensors: list[torch.Tensor | None], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.num_calls, self.is_waiting = 0, False
        self._tensors, self._barrier = tensors, barrier

    def add(self, tensor: torch.Tensor) -> None:
        tensor.copy_(sum(self._exchange(tensor)))

    def broadcast(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self._exchange(tensor)[0])

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(tensor), dim=1)

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


def run_ranks(count: int, run: Callable[[ThreadGroup], T]) -> list[T]:
    """Calls `run` in a thread for each rank, at the same time; returns what they return, in the order of the ranks."""
    tensors, barrier = [None] * count, threading.Barrier(count, timeout=TIMEOUT_S)
    groups = [ThreadGroup(Rank(index, count), tensors, barrier) for index in range(count)]

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
