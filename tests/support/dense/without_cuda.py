"""What a `CudaModelRunner` needs of CUDA, on a CPU: tests of what it enqueues, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch


class FakeChannel:
    """A `Channel` with nobody at its other end."""

    qkv = attn_out = torch.empty(32, 1)

    def begin_step(self, step_id: int, num_rows: int) -> None: ...
    def begin_layers(self, num_rows: int) -> None: ...
    def signal(self, flag: int) -> None: ...

    def wait(self, flag: int) -> None: ...

    def check(self) -> None: ...


class Event:
    def __init__(self, enable_timing: bool = False) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return 0.0

    def record(self) -> None: ...

    def query(self) -> bool:
        return True


class TorchWithoutCuda:
    """The module torch; memory of a GPU, and pinned memory, is usual memory."""

    cuda = SimpleNamespace(
        Stream=lambda device=None, **options: SimpleNamespace(device="cpu", synchronize=lambda: None),
        stream=lambda stream: nullcontext(),
        set_device=lambda device: None,
        Event=Event,
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: int, **options: Any) -> torch.Tensor:
        return torch.zeros(*size, dtype=options["dtype"])

    def empty(self, *size: int, **options: Any) -> torch.Tensor:
        return torch.empty(*size, dtype=options["dtype"])


class EagerGraphs:
    """`StepGraphs` that captures nothing."""

    def __init__(
        self, stream: object, warm_up: object, run: Callable[[tuple[int, int]], None], *, undisturbed: object = None
    ) -> None:
        self._run = run

    def find(self, size: tuple[int, int]) -> SimpleNamespace:
        return SimpleNamespace(replay=lambda: self._run(size))
