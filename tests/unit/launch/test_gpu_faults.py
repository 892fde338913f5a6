"""After a fault of the MPS server all clients of the GPU are ended, standbys too, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.common.errors import PeerError
from services.launch import gpu_faults
from services.launch.gpu_faults import GpuFaults


@dataclass
class FakeDaemon:
    """Answers in turn, then with the last answer again."""

    answers: list[bool | PeerError]
    num_asked: int = 0

    def has_fault(self) -> bool:
        answer = self.answers[min(self.num_asked, len(self.answers) - 1)]
        self.num_asked += 1
        if isinstance(answer, PeerError):
            raise answer
        return answer


@dataclass
class FakeChild:
    role: str
    pid: int
    is_running: bool = True
    device: str = "auto"
    reasons: list[str] = field(default_factory=list)

    def kill(self, reason: str) -> None:
        self.reasons.append(reason)
        self.is_running = False


def killed_after(daemon: FakeDaemon, services: Sequence[FakeChild], spares: Sequence[FakeChild]) -> list[int]:
    """The processes that are killed after a worker has ended."""

    async def run() -> None:
        faults: Any = GpuFaults(daemon, [services, spares])
        for child in services:
            if not child.is_running:
                faults.note_end(child)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await faults.run()

    asyncio.run(run())
    return [child.pid for child in (*services, *spares) if child.reasons]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([False], []),
        ([True, False], [2, 4]),
        ([False, True], [2, 4]),  # the server notices late
        ([PeerError("no answer")], []),
        ([PeerError("no answer"), True], [2, 4]),
    ],
)
def test_a_fault_ends_all_clients(
    answers: list[bool | PeerError], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_faults, "CHECKS_AFTER_S", (0.0, 0.01, 0.01))
    services = [FakeChild("attn_worker", 1, is_running=False), FakeChild("dense_worker", 2), FakeChild("gateway", 3)]
    daemon = FakeDaemon(answers)
    assert killed_after(daemon, services, [FakeChild("dense_worker", 4)]) == expected
    assert daemon.num_asked == 3


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([True, False], [2, 5]),
        ([False, True, False], [2, 5]),
        ([True, True, False], [2, 5]),  # they take a while to end
        ([True], [2, 3, 4, 5, 6]),  # it was another GPU, or all
    ],
)
def test_workers_of_other_gpus_are_ended_only_if_the_fault_stays(
    answers: list[bool | PeerError], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_faults, "CHECKS_AFTER_S", (0.0, 0.01, 0.01))
    services = [
        FakeChild("attn_worker", 1, is_running=False, device="cuda:0"),
        FakeChild("dense_worker", 2),
        FakeChild("attn_worker", 3, device="cuda:1"),
        FakeChild("dense_worker", 4, device="cuda:1"),
    ]
    spares = [FakeChild("attn_worker", 5, device="cuda"), FakeChild("attn_worker", 6, device="cuda:1")]
    assert killed_after(FakeDaemon(answers), services, spares) == expected


def test_an_end_during_the_last_check_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_faults, "CHECKS_AFTER_S", (0.0, 0.01))
    first, kept = FakeChild("attn_worker", 1, is_running=False), FakeChild("dense_worker", 4)
    later, other = FakeChild("attn_worker", 2, device="cuda:1"), FakeChild("dense_worker", 3, device="cuda:1")

    async def run() -> None:
        class Daemon(FakeDaemon):
            def has_fault(self) -> bool:
                if self.num_asked == 1:
                    later.is_running = False
                    loop.call_soon_threadsafe(faults.note_end, later)
                return super().has_fault()

        loop = asyncio.get_running_loop()
        faults: Any = GpuFaults(Daemon([False, False, True, False]), [[first, later, other, kept]])
        faults.note_end(first)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await faults.run()

    asyncio.run(run())
    assert not other.is_running and kept.is_running


def test_a_fault_is_found_though_the_worker_that_has_ended_is_another_launchers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_faults, "CHECKS_AFTER_S", (0.0, 0.0))
    worker = FakeChild("attn_worker", 1)

    async def run(interval_s: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await GpuFaults(FakeDaemon([True]), [[worker]], interval_s).run()

    asyncio.run(run(None))
    assert not worker.reasons
    asyncio.run(run(0.05))
    assert worker.reasons
