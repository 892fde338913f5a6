"""Kernels are compiled in forked processes, which fill a folder. Triton is not needed."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from hashlib import sha256
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

MODULE = "services.common.compile_kernels"


class AsyncCompileMode:
    """What Triton's does: asks the executor for each kernel, and waits for all at its end."""

    def __init__(self, executor: Executor) -> None:
        self.executor, self.futures, self.is_active = executor, list[Future[Any]](), False

    def __enter__(self) -> AsyncCompileMode:
        self.is_active = True
        return self

    def __exit__(self, *_: object) -> None:
        for future in self.futures:
            future.result(timeout=10)  # Triton's waits forever
        self.is_active = False

    def warm_up(self, kernel: Kernel) -> Future[Any]:
        future = self.executor.submit(kernel)
        future._key = kernel.name  # type: ignore[attr-defined]
        self.futures.append(future)
        return future


class Kernel:
    """A kernel that is compiled to a file with the id of the process that has compiled it."""

    def __init__(self, folder: Path, name: str, fail: Callable[[], None] = lambda: None) -> None:
        self.file, self.name, self._fail = folder / sha256(name.encode()).hexdigest() / "__grp__kernel.json", name, fail
        self.src = self.metadata = None
        self.is_loaded = False

    def __call__(self) -> Kernel:
        if not self.file.exists():
            self._fail()
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(str(os.getpid()))
        return self

    @property
    def run(self) -> None:
        self.is_loaded = True

    @property
    def compiled_by(self) -> int:
        return int(self.file.read_text())


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, with a Triton whose kernels are those above."""
    triton: Any = ModuleType("triton")
    runtime: Any = ModuleType("triton.runtime")
    cache: Any = ModuleType("triton.runtime.cache")
    modes: list[AsyncCompileMode] = []

    def make_mode(executor: Executor) -> AsyncCompileMode:
        modes.append(AsyncCompileMode(executor))
        return modes[-1]

    triton.AsyncCompileMode = make_mode
    runtime.driver = SimpleNamespace(active=SimpleNamespace(launcher_cls=lambda src, metadata: None))
    cache.get_cache_manager = lambda key: SimpleNamespace(cache_dir=str(tmp_path / key))
    for module in (triton, runtime, cache):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    module = importlib.import_module(MODULE)
    module.warm_up = lambda kernel: modes[-1].warm_up(kernel)
    module.is_active = lambda: modes[-1].is_active
    yield module
    del sys.modules[MODULE]


def test_missing_kernels_are_compiled_by_other_processes_and_loaded_here(kernels: Any, tmp_path: Path) -> None:
    all_kernels = [Kernel(tmp_path, str(number)) for number in range(5)]
    all_kernels[0]()
    with kernels.compiling_together():
        futures = [kernels.warm_up(kernel) for kernel in all_kernels]
        assert not any(future.done() for future in futures)
    assert [future.result() for future in futures] == all_kernels
    assert all(kernel.is_loaded for kernel in all_kernels)
    assert all_kernels[0].compiled_by == os.getpid()
    assert all(kernel.compiled_by != os.getpid() for kernel in all_kernels[1:])


def test_no_more_processes_compile_than_a_control_group_has_cores(
    kernels: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tmp_path / "cgroup"
    group.mkdir()
    (group / "cpu.max").write_text("100000 100000")  # one core
    monkeypatch.setattr("services.common.process._control_groups", lambda: [group])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    all_kernels = [Kernel(tmp_path, str(number)) for number in range(4)]
    with kernels.compiling_together():
        for kernel in all_kernels:
            kernels.warm_up(kernel)
    assert len({kernel.compiled_by for kernel in all_kernels} - {os.getpid()}) == 1


def test_nothing_is_forked_where_all_kernels_are_kept(
    kernels: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_kernels = [Kernel(tmp_path, str(number))() for number in range(3)]
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forks"))
    with kernels.compiling_together():
        for kernel in all_kernels:
            kernels.warm_up(kernel)
    assert all(kernel.is_loaded for kernel in all_kernels)


def test_an_error_comes_from_the_own_process(kernels: Any, tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError(f"no such layout, in process {os.getpid()}")

    broken, other = Kernel(tmp_path, "broken", fail), Kernel(tmp_path, "other")
    with pytest.raises(ValueError, match=f"in process {os.getpid()}"), kernels.compiling_together():
        kernels.warm_up(broken)
        kernels.warm_up(other)
    assert other.is_loaded and other.compiled_by != os.getpid()
    assert not kernels.is_active()


def test_an_error_before_the_end_is_raised_at_once_and_nothing_is_compiled(kernels: Any, tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, "noted")
    with pytest.raises(MemoryError, match="full"), kernels.compiling_together():
        future = kernels.warm_up(kernel)
        raise MemoryError("the device is full")
    assert not kernels.is_active() and not kernel.file.exists()
    assert future.result() is None, "its first launch compiles it"


def test_processes_that_the_kernel_reaps_have_ended(kernels: Any, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as a supervisor may leave it to its children
    try:
        all_kernels = [Kernel(tmp_path, str(number)) for number in range(3)]
        with kernels.compiling_together():
            for kernel in all_kernels:
                kernels.warm_up(kernel)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert all(kernel.is_loaded and kernel.compiled_by != os.getpid() for kernel in all_kernels)


def test_what_a_process_that_hangs_should_compile_is_compiled_here(
    kernels: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_pid = os.getpid()

    def hang() -> None:
        if os.getpid() != own_pid:
            time.sleep(600)

    monkeypatch.setattr(kernels, "_MAX_COMPILE_S", 0.5)
    stuck, other = Kernel(tmp_path, "stuck", hang), Kernel(tmp_path, "other")
    with capture_logs() as logs, kernels.compiling_together():
        kernels.warm_up(stuck)
        kernels.warm_up(other)
    assert stuck.compiled_by == own_pid and stuck.is_loaded
    # On a busy machine the other one may have no time to end either.
    warnings = [each for each in logs if each["log_level"] == "warning"]
    assert warnings
    for warning in warnings:
        with pytest.raises(ProcessLookupError):
            os.kill(warning["pid"], 0)


def test_what_no_process_can_be_forked_for_is_compiled_here(
    kernels: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "fork", refuse)
    all_kernels = [Kernel(tmp_path, str(number)) for number in range(3)]
    with kernels.compiling_together():
        for kernel in all_kernels:
            kernels.warm_up(kernel)
    assert all(kernel.is_loaded and kernel.compiled_by == os.getpid() for kernel in all_kernels)


def test_a_process_whose_parent_is_killed_at_once_compiles_nothing(
    kernels: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()  # at its end when no process is left
    worker = os.fork()
    if worker == 0:
        load = kernels.ctypes.CDLL

        def load_late(name: None) -> Any:
            """Before the forked process can ask for a signal at its parent's death."""
            parent = os.getppid()
            os.kill(parent, signal.SIGKILL)
            while os.getppid() == parent:
                time.sleep(0.001)
            return load(name)

        monkeypatch.setattr(kernels.ctypes, "CDLL", load_late)
        kernels._fork([Kernel(tmp_path, "orphan")])
        time.sleep(60)
        os._exit(1)
    os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == -signal.SIGKILL
    with open(reader, "rb") as end:
        assert end.read() == b""
    assert not Kernel(tmp_path, "orphan").file.exists()
