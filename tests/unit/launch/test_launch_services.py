"""Launchers of a part of the services, as each in a container of its own: they meet at addresses, and nowhere else."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from services.common.config import SERVICES, Config, dump_config, load_config
from services.common.errors import CapacityError, ConfigError, InvalidRequest, PeerError
from services.launch import memory_plan, mps, standby
from services.launch.addresses import check_addresses, place_sockets
from services.launch.arguments import parse_args
from services.launch.child import ATTENTION_ROLE, DENSE_ROLE, SECTIONS, Child
from services.launch.early_services import EarlyServices
from services.launch.gpus import Gpu
from services.launch.memory_plan import plan_memory
from services.launch.service import Launcher
from services.launch.servicer import LauncherServicer
from services.pb import launch_pb2

TIMEOUT_S = 30.0
KEYS = ("attention.address", "dense.address", "gateway.address", "gateway.http_address", "gateway.local_address")
State = launch_pb2.StandbyStatus


def config_of(directory: Path, *services: str, **settings: object) -> Config:
    own = ", ".join(f'"{each}"' for each in services)
    addresses = [f"{key}=unix:{directory}/{key}" for key in KEYS]
    others = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
    return load_config(None, [f"launch.services=[{own}]", "launch.stop_grace_s=5", *addresses, *others])


@pytest.mark.parametrize("value", ["[]", '["dense_worker", "dense_worker"]', '["dense"]'])
def test_the_services_must_be_named_once_and_by_their_names(value: str) -> None:
    with pytest.raises(ConfigError, match=r"launch\.services"):
        load_config(None, [f"launch.services={value}"])


def test_a_service_reads_back_the_config_of_its_launcher(tmp_path: Path) -> None:
    config = config_of(tmp_path, DENSE_ROLE)
    (tmp_path / "config.toml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.toml") == config


@pytest.mark.parametrize(
    ("services", "missing"),
    [
        ([ATTENTION_ROLE], "attention"),
        ([DENSE_ROLE], "attention"),
        ([DENSE_ROLE], "dense"),
        (["gateway"], "dense"),
        ([ATTENTION_ROLE, DENSE_ROLE], "dense"),
        ([DENSE_ROLE, "gateway"], "attention"),
    ],
)
def test_an_address_at_which_launchers_meet_must_be_set(services: Sequence[str], missing: str, tmp_path: Path) -> None:
    own = ", ".join(f'"{each}"' for each in services)
    present = [f"{name}.address=unix:{tmp_path}/{name}" for name in ("attention", "dense") if name != missing]
    config = load_config(None, [f"launch.services=[{own}]", *present])
    with pytest.raises(ConfigError, match=rf"launch\.services is .*: set {missing}\.address, at which .*dense_worker"):
        place_sockets(config, tmp_path, is_private=False)
    place_sockets(config_of(tmp_path, *services), tmp_path, is_private=False)


def test_only_the_own_ports_must_be_free(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        for key, own in (("dense__address", DENSE_ROLE), ("gateway__http_address", "gateway")):
            for role in SERVICES:
                config = config_of(tmp_path, role, **{key: address})
                with pytest.raises(ConfigError, match="port in use") if role == own else contextlib.nullcontext():
                    check_addresses(config)
    check_addresses(config_of(tmp_path, "gateway", dense__address="dns:///workers:50052"))


@pytest.mark.parametrize("flag", ["--prompt", "--sample-prompt"])
def test_a_prompt_needs_all_services(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text(dump_config(config_of(tmp_path, DENSE_ROLE, "gateway")))
    with pytest.raises(SystemExit):
        parse_args([flag, "Hello", "--config", str(tmp_path / "config.toml")])
    assert "need all services, launch.services is dense_worker, gateway" in capsys.readouterr().err


@pytest.mark.parametrize("settings", [{}, {"launch__standby_dense": "loaded", "attention__host_kv_bytes": 2**20}])
def test_each_launcher_plans_its_own_memory_and_together_they_plan_all(
    settings: dict[str, object], tmp_path: Path
) -> None:
    on_cpu = {"dense__device": "cpu", "attention__device": "cpu"} | settings

    def needs(*services: str) -> dict[tuple[str, str], int]:
        places = plan_memory(config_of(tmp_path, *services, **on_cpu))
        return {(place.name, need.what): need.num_bytes for place in places for need in place.needs}

    parts = [needs(role) for role in SERVICES]
    assert [len(part) for part in parts] == [3 + 2 * bool(settings), 3 + bool(settings), 1]
    whole = needs(*SERVICES)
    for name in {name for part in parts for name in part if not name[1].endswith("processes")}:
        assert [part[name] for part in parts if name in part] == [whole[name]]
    assert sum(part["host memory", "1 processes"] for part in parts) == whole["host memory", "3 processes"]


def test_each_launcher_plans_the_context_of_its_own_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu("GPU-1", "NVIDIA H100", 2**30)
    monkeypatch.setattr(memory_plan, "is_on_gpu", lambda device: True)
    monkeypatch.setattr(memory_plan, "list_gpus", lambda: [gpu])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def contexts(*services: str) -> list[int]:
        places = plan_memory(config_of(tmp_path, *services))
        return [each.num_bytes for place in places for each in place.needs if each.what == "contexts"]

    assert contexts(ATTENTION_ROLE) == contexts(DENSE_ROLE) == [memory_plan.CONTEXT_BYTES] and contexts("gateway") == []
    assert contexts(*SERVICES) == [2 * memory_plan.CONTEXT_BYTES]


def test_the_daemon_of_another_container_is_found_by_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("has_mps", "has_gpu"):
        monkeypatch.setattr(mps, name, lambda: True)
    monkeypatch.setattr(mps.MpsDaemon, "_ask", lambda daemon, command: "")  # it has no clients yet
    config = config_of(tmp_path, DENSE_ROLE)
    monkeypatch.delenv(mps.PIPE_VARIABLE, raising=False)
    assert mps.find_mps(config) is None
    with pytest.raises(PeerError, match=r"launch\.mps is 'on', but CUDA_MPS_PIPE_DIRECTORY is not set"):
        mps.find_mps(config_of(tmp_path, DENSE_ROLE, launch__mps="on"))
    monkeypatch.setenv(mps.PIPE_VARIABLE, f"{tmp_path}/mps/pipe")
    found = mps.find_mps(config)
    assert found is not None and found.environment[mps.PIPE_VARIABLE] == f"{tmp_path}/mps/pipe"
    assert mps.find_mps(config_of(tmp_path, DENSE_ROLE, launch__mps="off")) is None
    assert mps.find_mps(config_of(tmp_path, DENSE_ROLE, attention__device="cpu")) is None


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "POLL_S", 0.01)
    monkeypatch.setattr(Child, "module", "tests.support.workers.scripted_service")


@contextlib.asynccontextmanager
async def running(config: Config) -> AsyncIterator[Launcher]:
    """A launcher whose services do nothing."""
    launcher = Launcher(
        config,
        argparse.Namespace(prompt=None, sample_prompt=None, api_key=None),
        asyncio.Event(),
        "twostroke chat",
        EarlyServices(),
    )
    try:
        await launcher.start()
        run = asyncio.create_task(launcher.run())
        try:
            yield launcher
            if run.done():
                run.result()
        finally:
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)
    finally:
        await launcher.stop()


@pytest.mark.parametrize("call", ["symlink_to", "write_text"])
def test_a_start_on_a_full_disk_ends_with_an_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Of a worker's address, or of a service's configuration."""

    def fill(self: Path, _: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    async def start() -> None:
        monkeypatch.setattr(Path, call, fill)
        async with running(config_of(tmp_path, DENSE_ROLE)):
            pass

    named = {"symlink_to": r"dense\.address-\w+-1\.link'", "write_text": r"dense_worker\.toml'"}[call]
    with pytest.raises(CapacityError, match=rf"cannot be started: .*No space left on device: '\S*{named}"):
        asyncio.run(start())
    assert not list(tmp_path.iterdir())


async def until(is_done: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not is_done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def is_ready(launcher: Launcher) -> bool:
    return all(each.status().state == State.READY for each in launcher._standbys.values())


def test_a_launcher_for_each_worker_keeps_its_standby_which_takes_over_at_the_common_address(tmp_path: Path) -> None:
    async def main() -> None:
        async with contextlib.AsyncExitStack() as opened:
            launchers = {
                role: await opened.enter_async_context(running(config_of(tmp_path, role))) for role in SECTIONS
            }
            for role, launcher in launchers.items():
                [child] = launcher._children
                assert child.role == role and [*launcher._standbys] == [(role, 0)]
                await until(lambda launcher=launcher: is_ready(launcher))
                spare = launcher._standbys[role, 0].spare
                assert spare is not None and child.pid is not None
                os.kill(child.pid, signal.SIGKILL)
                await until(lambda launcher=launcher, child=child: [*launcher._children] != [child])
                assert [*launcher._children] == [spare]
                link = tmp_path / f"{SECTIONS[role]}.address"
                assert f"unix:{link.resolve()}" == spare.address and link.resolve().parent == tmp_path
        assert not [path for path in tmp_path.iterdir() if path.is_socket() or path.is_symlink()]

    asyncio.run(main())


def test_a_launcher_of_gateways_starts_without_workers(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(config_of(tmp_path, "gateway")) as launcher:
            [gateway] = launcher._children
            await until(lambda: gateway.may_restart)
            assert gateway.role == "gateway" and not launcher._standbys

    asyncio.run(main())


def test_a_launcher_without_the_dense_worker_says_that_it_cannot_replace_it(tmp_path: Path) -> None:
    async def main() -> None:
        servicer = LauncherServicer([], None, [])
        with pytest.raises(InvalidRequest, match="no dense worker"):
            await servicer.ReplaceDense(launch_pb2.ReplaceDenseRequest(), None)

    asyncio.run(main())
