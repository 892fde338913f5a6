"""A child process of the launcher."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

import services.launch.child
from services.common.child_options import ChildOptions, Standby
from services.common.config import Config, LaunchSection, load_config
from services.common.errors import PeerError
from services.launch.child import Child
from services.launch.children import Children
from services.launch.hang import describe_hang
from services.launch.lifelines import Lifelines

TIMEOUT_S = 60.0


def make_child(directory: Path, role: str, config: Config, options: ChildOptions | None = None) -> Child:
    own = {"run_dir": directory, "environment": None, "lifelines": Lifelines()}
    return Child(role, role, config, options or ChildOptions(), **own)


def test_an_end_is_noticed_although_the_threads_of_the_event_loop_are_busy(tmp_path: Path) -> None:
    is_over = threading.Event()

    async def watch() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        busy = asyncio.ensure_future(asyncio.to_thread(is_over.wait))
        # This module does not exist.
        child = make_child(tmp_path, "nobody", Config())
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await child.watch()
        finally:
            is_over.set()
            await busy

    with pytest.raises(PeerError, match="nobody ended before the cluster could serve: exit code 1"):
        asyncio.run(watch())


@pytest.mark.parametrize(("standby", "num_restarts"), [(None, 1), ("loaded", 0)])
def test_a_process_that_is_killed_before_the_cluster_serves_is_restarted_once_unless_it_is_to_replace_another(
    tmp_path: Path, standby: Standby | None, num_restarts: int
) -> None:
    async def run() -> None:
        config, options = Config(launch=LaunchSection(restart_delay_s=0.01)), ChildOptions(standby=standby)
        child = make_child(tmp_path, "attn_worker", config, options)
        child.config_file.unlink()
        os.mkfifo(child.config_file)  # the service waits for a writer until it is killed
        watcher, killed = asyncio.create_task(child.watch()), []
        async with asyncio.timeout(TIMEOUT_S):
            while not watcher.done():
                if child.is_running and child.pid not in killed:
                    assert child.pid is not None
                    killed.append(child.pid)
                    os.kill(child.pid, signal.SIGKILL)
                await asyncio.sleep(0.01)
        with pytest.raises(PeerError, match="attn_worker ended before the cluster could serve: signal SIGKILL"):
            watcher.result()
        assert len(killed) == 1 + num_restarts

    asyncio.run(run())


@pytest.mark.parametrize("num_failures", [2, 3])
def test_a_process_that_cannot_be_started_counts_as_one_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_failures: int
) -> None:
    num_calls, is_over = 0, asyncio.Event()

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        nonlocal num_calls
        num_calls += 1
        if num_calls <= num_failures:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        is_over.set()
        return subprocess.Popen(["sleep", "100"])

    async def run() -> None:
        child = make_child(tmp_path, "gateway", Config(launch=LaunchSection(restart_delay_s=0.01, max_restarts=2)))
        child.may_restart = True
        monkeypatch.setattr(services.launch.child, "start_process", start)
        child.start()
        async with asyncio.timeout(TIMEOUT_S):
            if num_failures == 3:
                await child.watching
            await is_over.wait()
            assert child.is_running and child.num_restarts == num_failures
            await child.end()

    if num_failures == 3:
        with pytest.raises(PeerError, match="limit is 2 restarts; the last time: it cannot be started: "):
            asyncio.run(run())
    else:
        asyncio.run(run())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_once_after_the_start_of_a_process_ends_it_with_status_0(
    tmp_path: Path, number: signal.Signals
) -> None:
    async def run() -> None:
        child = make_child(tmp_path, "attn_worker", Config(), ChildOptions(standby="loaded"))
        watcher = asyncio.create_task(child.watch())
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.sleep(0)  # it begins by starting the process
            assert child.pid is not None
            os.kill(child.pid, number)
            await watcher

    with pytest.raises(PeerError, match="attn_worker ended before the cluster could serve: exit code 0"):
        asyncio.run(run())


def test_a_child_keeps_its_config_if_the_disk_has_no_room_for_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def make() -> Child:
        return make_child(tmp_path, "dense_worker", Config())

    child = asyncio.run(make())
    other = Config().with_values("dense", num_threads=3)
    write_text = Path.write_text

    def is_full(self: Path, text: str) -> None:
        write_text(self, text[: len(text) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", is_full)
        with pytest.raises(OSError, match="No space left"):
            child.reconfigure(other)
    assert child.config == load_config(child.config_file) == Config()
    child.reconfigure(other)
    assert child.config == load_config(child.config_file) == other


def test_a_stop_does_not_wait_for_a_delayed_restart(tmp_path: Path) -> None:
    config = Config(launch=LaunchSection(restart_delay_s=TIMEOUT_S))

    async def run() -> None:
        child = make_child(tmp_path, "nobody", config)
        children = Children()
        child.may_restart = True
        async with asyncio.timeout(TIMEOUT_S / 2):
            children.start(child)
            while not child.last_end:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await children.stop(1.0)

    asyncio.run(run())


def test_the_log_says_what_a_child_does_before_it_is_killed_because_it_hangs(tmp_path: Path) -> None:
    """A pipe without a writer in place of its config: its main thread waits for it."""

    async def run() -> None:
        child = make_child(tmp_path, "attn_worker", Config(), ChildOptions(standby="loaded"))
        child.config_file.unlink()
        os.mkfifo(child.config_file)
        watcher = asyncio.create_task(child.watch())
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.sleep(0)
            while "load_config" not in describe_hang(child.pid or 0).stacks:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            with capture_logs() as logs:
                await child.kill_hanging("no answer to 3 health checks")
            with pytest.raises(PeerError, match="signal SIGKILL from the launcher: no answer to 3 health checks"):
                await watcher
        [line] = [each for each in logs if each["event"] == "what a service that hangs does"]
        assert line["role"] == "attn_worker" and "in load_config" in line["stacks"] and line["threads"]

    asyncio.run(run())


def test_a_child_that_hangs_is_killed_even_if_no_thread_can_be_started_to_look_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def run() -> None:
        child = make_child(tmp_path, "attn_worker", Config(), ChildOptions(standby="loaded"))
        child.config_file.unlink()
        os.mkfifo(child.config_file)
        watcher = asyncio.create_task(child.watch())
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.sleep(0)
            with monkeypatch.context() as exhausted, capture_logs() as logs:
                exhausted.setattr(threading.Thread, "start", start)
                await child.kill_hanging("no answer to 3 health checks")
            with pytest.raises(PeerError, match="signal SIGKILL from the launcher: no answer to 3 health checks"):
                await watcher
        assert [each["reason"] for each in logs if "is not known" in each["event"]] == ["can't start new thread"]

    asyncio.run(run())
