"""What a service does with its own process: end with its parent, import modules, measure its memory."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import math
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

_THRESHOLDS = (700, 5, 100)  # see `gc.set_threshold`; Python's defaults are 700, 10 and 10
_FEW_YOUNG = 100  # objects, of the 700 behind which Python collects them by itself
STANDBY_BYTES = 2**30  # of the host that must be available for a standby's modules; they take about half
# Of a GPU that must be free for a dense worker's standby with weights: for the buffers of a step and what libraries
# take, and what must stay free for the worker that serves, which may still capture graphs when steps first need them.
GPU_STANDBY_BYTES = 2**29 + 2**31
LOW_PRIORITY = 10  # added to the nice value: a tenth of a core beside a thread that is always busy
CGROUPS = Path("/sys/fs/cgroup")
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
STACKS_SIGNAL = signal.SIGUSR2
STACKS_FILE = "stacks"  # name of the file in memory that has them
PR_SET_PDEATHSIG = 1
_PF_EXITING = 4  # among the flags of a process in Linux's include/linux/sched.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # see mallopt(3)
LARGE_BYTES = 2**20


def begin_service() -> None:
    """What the process of each service does before its imports, which take seconds."""
    end_at_signals()
    write_stacks_at_signal()
    set_up_grpc()


def end_at_signals() -> None:
    """Lets SIGINT and SIGTERM end this process with status 0, until `run_service` handles them.

    Call it before the imports, which take seconds. By default SIGINT would raise KeyboardInterrupt within one of them.
    Nothing is open yet, so there is nothing to close.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: os._exit(0))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def write_stacks_at_signal() -> None:
    """Lets the launcher see what this process does if it hangs, see `services/launch/hang.py`. Call it before imports.

    `STACKS_SIGNAL` writes the stacks of all threads to a file in memory, which this process keeps open, even while one
    of them holds the interpreter lock.
    """
    with contextlib.suppress(OSError):
        faulthandler.register(STACKS_SIGNAL, os.memfd_create(STACKS_FILE), all_threads=True)


def set_up_grpc() -> None:
    """Switches two parts of gRPC off. Call it before gRPC is imported. What the user has set stays.

    Its event engine has threads that pass each message on once more: a message and its answer take a quarter less time
    without. Its handlers of forks start threads in a forked process, which take messages from those of this one.
    """
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def give_back_large_blocks() -> None:
    """Lets the system have memory of large blocks, such as bodies, as soon as they are freed.

    By default glibc raises the size of such blocks up to 32 MiB with the first that are freed, and keeps smaller ones.
    """
    _set_allocator(_M_MMAP_THRESHOLD, LARGE_BYTES)
    _set_allocator(_M_TRIM_THRESHOLD, 8 * LARGE_BYTES)


def keep_freed_blocks(num_bytes: int) -> None:
    """Lets this process keep up to so many bytes that it has freed, at most 32 MiB, for what it allocates next.

    It takes the kernel about as long to give pages to a decoder as it takes the decoder to fill them.
    """
    _set_allocator(_M_MMAP_THRESHOLD, num_bytes)
    _set_allocator(_M_TRIM_THRESHOLD, num_bytes)


def _set_allocator(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # another C library has another allocator
        mallopt(option, value)


@contextlib.contextmanager
def holding_back_signals() -> Iterator[None]:
    """A context in which a service's process is started: signals to stop reach it when it calls `end_at_signals`.

    Otherwise they would end it with another status than 0 while its interpreter starts.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_with_parent(parent_pid: int) -> None:
    """Sends this process SIGINT (end at once) when its parent ends for whatever reason.

    The kernel sends SIGCONT first: only this signal wakes a stopped process and still lets it clean up.
    """

    def end_if_orphaned(*_: object) -> None:
        if os.getppid() != parent_pid:
            os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGCONT, end_if_orphaned)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    end_if_orphaned()  # the parent may have ended already


def is_ending(pid: int) -> bool:
    """Whether a process is being killed, or has ended.

    Its sockets and files end later: the kernel first takes apart its memory, which takes tens of milliseconds, on busy
    cores hundreds.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # no free descriptor, or a process that is hidden from this one
        return False
    state, *rest = stat[stat.rindex(b")") + 2 :].split()
    return state in (b"Z", b"X") or bool(int(rest[5]) & _PF_EXITING)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """A context for importing a service's modules, which live as long as the process.

    The garbage collector skips these modules now and later. It would take a fifth of the import time, and each later
    full collection would stop all streams for a quarter of a second. transformers, whenever it is imported, is made to
    believe that torch is not installed: we use it only for a config.json or a tokenizer, for which it would import
    torch's compiler (2 s). torch, likewise, is imported without a part that takes a third of its import.
    """
    gc.disable()
    if not any(isinstance(finder, _FindsLargePackages) for finder in sys.meta_path):
        sys.meta_path.insert(0, _FindsLargePackages())
    yield
    gc.freeze()
    gc.enable()


@contextlib.contextmanager
def hiding(package: str) -> Iterator[None]:
    """A context in which a package seems not to be installed, for importing another one that would use it."""
    module = sys.modules.get(package)
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if module is None:
            del sys.modules[package]
        else:
            sys.modules[package] = module


def collect_rarely() -> None:
    """Makes the pauses of the garbage collector short and rare. Call it when what lives as long as the process is made.

    A full collection takes 0.2 us for each object, 17 ms with 500 streams, and Python's defaults would make one every
    two seconds while they run, which finds nothing: nearly all that dies is freed by reference counts. Cycles that are
    older than the youngest generations wait five times as long for it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


def collect_young() -> None:
    """Collects the youngest garbage now, while nobody waits, unless there is hardly any.

    Otherwise one of twenty requests would wait for that, half a millisecond: all that it looks at has left the
    processor's caches.
    """
    if gc.get_count()[0] > _FEW_YOUNG:
        gc.collect(1)


def import_at_low_priority(module: str) -> None:
    """Imports a service's module for a process that is to replace another one, which serves now."""
    with importing(), low_priority_thread() as thread:
        thread.submit(importlib.import_module, module).result()


class _FindsLargePackages(importlib.abc.MetaPathFinder):
    """Loads torch and transformers as services want them, whichever module needs them first."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        loader = _LOADERS.get(name)
        if loader is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads a module as another loader does."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)


_LEAVES_OUT_OF = ("2.11", "2.12", "2.13")


class _LeavesOutCompiling(_Loader):
    """Of torch, without what only compilers and exports need: what operators make of tensors without data.

    Who exports imports `torch._meta_registrations` before, which then does all that it would have done here. Of a torch
    in which nobody has looked what else that module does, all is loaded.
    """

    def exec_module(self, module: ModuleType) -> None:
        if importlib.metadata.version("torch").rpartition(".")[0] not in _LEAVES_OUT_OF:
            super().exec_module(module)
            return
        name = "_meta_registrations"
        sys.modules[f"torch.{name}"] = ModuleType(name)
        try:
            self._loader.exec_module(module)
        finally:
            del sys.modules[f"torch.{name}"]
        delattr(module, name)
        torch_c = sys.modules["torch._C"]
        if hasattr(torch_c, "_set_generator_metaclass"):  # torch 2.13 makes no generator before
            torch_c._set_generator_metaclass(importlib.import_module("torch._opaque_base").OpaqueBaseMeta)


class _HidesTorch(_Loader):
    """Of transformers."""

    def exec_module(self, module: ModuleType) -> None:
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # otherwise it prints advice to install torch
        thread, find_spec = threading.get_ident(), importlib.util.find_spec

        def find_other(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
            """`hiding` would hide it from other threads, too, which use torch meanwhile, and torch imports itself."""
            return None if name == "torch" and threading.get_ident() == thread else find_spec(name, package)

        importlib.util.find_spec = find_other
        try:
            self._loader.exec_module(module)
            importlib.import_module("transformers.utils").is_torch_available()  # transformers caches the answer
        finally:
            importlib.util.find_spec = find_spec


class _ReadsFoldersOnce(_Loader):
    """Of the part of transformers that reads its 3,300 source files for what they export, those of models twice."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        read = getattr(module, "create_import_structure_from_path", None)
        if read is not None:
            module.create_import_structure_from_path = functools.cache(read)  # type: ignore[attr-defined]


_LOADERS = {
    "torch": _LeavesOutCompiling,
    "transformers": _HidesTorch,
    "transformers.utils.import_utils": _ReadsFoldersOnce,
}


def proportional_bytes(pid: int) -> int:
    """Memory of a process that is in RAM; a page that several processes share counts in equal parts for each.

    0 if there is no such process.
    """
    try:
        with open(f"/proc/{pid}/smaps_rollup") as rollup:
            return next(int(line.split()[1]) << 10 for line in rollup if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is in RAM and has no pages of files. 0 if there is no such process."""
    try:
        with open(f"/proc/{pid}/status") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon:"))
    except (OSError, StopIteration):
        return 0


def cpu_wait_s(pid: int) -> float:
    """How long a process's main thread has waited for a CPU since its start: able to run, while others ran.

    0 if there is no such process, or if the kernel does not count it.
    """
    try:
        with open(f"/proc/{pid}/schedstat") as statistics:
            return int(statistics.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def available_bytes() -> int:
    """Memory that this process could still get: of the machine, or of a control group above it that has less.

    Pages of files that were read, such as a model's, count as free: the kernel gives them up for others.
    """
    with open("/proc/meminfo") as meminfo:
        available = next(int(line.split()[1]) << 10 for line in meminfo if line.startswith("MemAvailable:"))
    return max(0, int(min([available, *map(_available_to_group, _control_groups())])))


def available_cores() -> int:
    """Cores that this process may keep busy, one at least: those it may run on, or fewer by a control group's quota."""
    cores = float(len(os.sched_getaffinity(0)))
    for directory in _control_groups():
        with contextlib.suppress(OSError, ValueError):  # the root has no quota
            quota, period = (directory / "cpu.max").read_text().split()
            cores = min(cores, int(quota) / int(period) if quota != "max" else math.inf)
    return max(1, int(cores))


def _control_groups() -> list[Path]:
    """The control groups of version 2 above this process, its own first."""
    with contextlib.suppress(OSError, StopIteration), open("/proc/self/cgroup") as groups:
        group = next(line.strip().removeprefix("0::/") for line in groups if line.startswith("0::/"))
        own = CGROUPS / group
        return [each for each in (own, *own.parents) if each.is_relative_to(CGROUPS)]
    return []


def _available_to_group(directory: Path) -> float:
    """What a control group of version 2 may still take; infinite without a limit, as the root has none."""
    try:
        limit, used = ((directory / name).read_text().strip() for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except OSError:
        return math.inf
    if limit == "max":
        return math.inf
    return int(limit) - int(used) + int(statistics["active_file"]) + int(statistics["inactive_file"])


def low_priority_thread() -> ThreadPoolExecutor:
    """An executor of one thread whose work leaves the CPU to other processes. Threads that it starts do so, too.

    Only a thread: a process without privileges cannot raise its own priority again.
    """
    return ThreadPoolExecutor(1, "low-priority", lambda: os.nice(LOW_PRIORITY))


def resident_bytes() -> int:
    """Memory of this process that is in RAM, shared pages included."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()
