"""A service ends when the process that started it ends, and at a signal, also while it starts."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.common.process import collect_young, holding_back_signals, is_ending
from tests.support.garbage import make_cycle

CHILD = """
import os, sys, time
from services.common.cli import parse_service_args
parent = int(sys.argv[1])
while os.getppid() == parent:
    time.sleep(0.01)
parse_service_args("child", ["--child", f'{{"launcher_pid": {sys.argv[1]}}}'])
print("goes on")
"""
PARENT = f"import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', {CHILD!r}, str(os.getpid())])"


def test_a_process_ends_if_its_parent_had_ended_before_its_first_check() -> None:
    result = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    assert result.stdout == "" and "KeyboardInterrupt" in result.stderr


SERVICE = """
import asyncio, os, sys
from services.common.cli import parse_service_args
from services.rpc.server import run_service
async def serve():
    print(os.getpid(), flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("cleaned up", flush=True)
parse_service_args("child", ["--child", f'{{"launcher_pid": {sys.argv[1]}}}'])
run_service(serve())
"""
LAUNCHER = f"import os, subprocess, sys; subprocess.run([sys.executable, '-c', {SERVICE!r}, str(os.getpid())])"


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_service_whose_parent_is_killed_cleans_up_and_ends(is_stopped: bool) -> None:
    parent = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    for number in (signal.SIGSTOP, signal.SIGCONT):  # these alone do not end it
        os.kill(pid, number)
    if is_stopped:
        os.kill(pid, signal.SIGSTOP)
    parent.kill()
    try:
        output, _ = parent.communicate(timeout=60)  # returns when all processes have closed the pipe
    finally:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)
    assert output.startswith("cleaned up\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_before_a_service_has_started_end_it_with_status_0_and_without_a_traceback(
    tmp_path: Path, number: signal.Signals
) -> None:
    config = tmp_path / "config.toml"
    os.mkfifo(config)  # a service that opens it waits for a writer
    services = [
        subprocess.Popen(
            [sys.executable, "-m", f"services.{name}", "--config", str(config)], stderr=subprocess.PIPE, text=True
        )
        for name in ("gateway", "dense_worker", "attn_worker")
    ]
    with config.open("w"):  # returns when one of them reads; the end of the file comes only after this block
        for service in services:
            wait_until_reading(service, config)
            service.send_signal(number)
        ends = [(service.communicate(timeout=60)[1], service.returncode) for service in services]
    assert ends == [("", 0)] * 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_while_the_interpreter_starts_end_a_service_with_status_0(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "services.attn_worker", "--config", "no such file"]
    with holding_back_signals():
        service = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    service.send_signal(number)
    assert (service.communicate(timeout=60)[1], service.returncode) == ("", 0)


def wait_until_reading(process: subprocess.Popen[str], path: Path) -> None:
    deadline = time.monotonic() + 60
    while not any(is_link_to(file, path) for file in Path(f"/proc/{process.pid}/fd").iterdir()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_link_to(link: Path, path: Path) -> bool:
    try:
        return os.readlink(link) == str(path)
    except FileNotFoundError:  # it has just been closed
        return False


def test_young_garbage_is_collected_unless_there_is_hardly_any() -> None:
    gc.collect()
    gc.disable()
    try:
        collect_young()
        few = make_cycle()
        collect_young()
        assert few() is not None
        kept = [[] for _ in range(300)]
        collect_young()
        assert few() is None and len(kept) == 300
    finally:
        gc.enable()


COLLECTED_RARELY = """
import gc, weakref
from services.common.process import collect_rarely

class Node:
    pass

full = []
gc.callbacks.append(lambda phase, info: full.append(info) if phase == "stop" and info["generation"] == 2 else None)
parts = [[] for _ in range(50_000)]  # of a service
collect_rarely()
full.clear()
old = Node()
old.itself = old
seen = weakref.ref(old)
waves, num_allocated = [], 0
while seen() is not None and num_allocated < 10_000_000:
    waves = [[] for _ in range(5_000)]  # live for a while, as the objects of a step
    num_allocated += len(waves)
    if num_allocated == 100_000:
        print(sum(len(gc.get_objects(generation)) for generation in range(3)) < len(parts), len(full))
        del old
print(seen() is None, len(full))
"""


def test_a_service_makes_full_collections_rarely_and_of_its_requests_objects_alone() -> None:
    result = subprocess.run(
        [sys.executable, "-c", COLLECTED_RARELY], capture_output=True, text=True, timeout=60, check=True
    )
    young, end = result.stdout.splitlines()
    assert young == "True 0", "with Python's defaults there would be several full collections by now"
    assert end == "True 1", "what is old and refers to itself is found in the end"


def test_transformers_is_imported_without_torch_while_other_threads_import_torch() -> None:
    program = """
import sys, threading
from services.common.process import importing
with importing():
    pass
import torch
from concurrent.futures import ThreadPoolExecutor, wait
with ThreadPoolExecutor(1) as thread:  # as `Grammars` does for a model without a tokenizer.json
    future = thread.submit(__import__, "transformers")
    while wait([future], timeout=0.01).not_done:
        exec("import torch")
    future.result()
from transformers.utils import is_torch_available
assert not is_torch_available()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_service_imports_torch_without_what_only_compilers_need_and_draws_the_same_numbers() -> None:
    program = """
import contextlib, sys
from services.common.process import importing
with importing() if sys.argv[1] == "service" else contextlib.nullcontext():
    import torch
print("torch._meta_registrations" in sys.modules, hasattr(torch, "_meta_registrations"))
print(torch.randn(3, generator=torch.Generator().manual_seed(7)).tolist())
"""
    service, plain = (
        subprocess.check_output([sys.executable, "-c", program, of], text=True, timeout=120).splitlines()
        for of in ("service", "plain")
    )
    assert (service[0], plain[0]) == ("False False", "True True")
    assert service[1] == plain[1]


def test_of_an_unknown_torch_all_is_imported() -> None:
    program = """
import importlib.metadata, sys
importlib.metadata.version = lambda name: "99.1.0"
from services.common.process import importing
with importing():
    import torch
print("torch._meta_registrations" in sys.modules)
"""
    assert subprocess.check_output([sys.executable, "-c", program], text=True, timeout=120) == "True\n"


def test_transformers_reads_what_its_models_export_once() -> None:
    program = """
import builtins, collections
from services.common.process import importing
read, open_as_before = collections.Counter(), open
def open_and_count(file, *args, **options):
    read[str(file)] += 1
    return open_as_before(file, *args, **options)
builtins.open = open_and_count
with importing():
    from transformers import AutoTokenizer
assert AutoTokenizer.__module__ == "transformers.models.auto.tokenization_auto"
print({count for file, count in read.items() if "/transformers/models/mamba/" in file})
"""
    assert subprocess.check_output([sys.executable, "-c", program], text=True, timeout=120).strip() == "{1}"


def test_a_process_is_not_taken_for_ending_because_no_file_can_be_opened() -> None:
    assert not is_ending(os.getpid())
    limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard_limit))
    try:
        assert not is_ending(os.getpid())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard_limit))
    process = subprocess.Popen(["true"])
    process.wait()
    assert is_ending(process.pid)
