"""The systemd unit is valid, and the launcher tells systemd what the unit says that it does."""

from __future__ import annotations

import asyncio
import configparser
import contextlib
import os
import queue
import re
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.config import ServiceManagerEnvironment, load_config, service_manager_of_environment
from services.common.errors import ConfigError
from services.launch import service_manager
from services.launch.service_manager import ServiceManager
from tests.deploy.compose_file import DEPLOY
from tests.support.cluster import free_port, running_cluster
from tests.support.models import ONE_LAYER

UNIT = DEPLOY / "systemd" / "twostroke.service"
TIMEOUT_S = 60.0
WATCHDOG_S = 1.0


class Systemd:
    """The end of the socket where systemd listens."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self._messages: queue.Queue[tuple[float, str]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def receive(self) -> str:
        return self._messages.get(timeout=TIMEOUT_S)[1]

    def receive_at(self) -> tuple[float, str]:
        """The next message and when it came."""
        return self._messages.get(timeout=TIMEOUT_S)

    def _read(self) -> None:
        """A queue of the system takes ten datagrams, so systemd never lets them wait."""
        with contextlib.suppress(OSError):
            while message := self.socket.recv(4096).decode():
                self._messages.put((time.monotonic(), message))


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    systemd = Systemd(str(tmp_path / "notify"))
    yield systemd
    systemd.socket.shutdown(socket.SHUT_RD)
    systemd.socket.close()


def settings_of(section: str) -> dict[str, str]:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read(UNIT)
    return dict(parser[section])


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / UNIT.name
    program = settings_of("Service")["ExecStart"].split()[0]
    unit.write_text(UNIT.read_text().replace(program, sys.executable))  # one that exists here
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert checked.returncode == 0 and UNIT.name not in checked.stderr, checked.stderr
    unit.write_text(unit.read_text().replace("Type=notify", "Type=notfy"))
    checked = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert "notfy" in checked.stderr, "it would find a mistake"


def test_the_unit_waits_as_long_as_the_server_takes(tmp_path: Path) -> None:
    service, config = settings_of("Service"), load_config(None)
    assert service["Type"] == "notify" and service["NotifyAccess"] == "main"
    assert float(service["TimeoutStopSec"]) > config.gateway.drain_timeout_s + 2 * config.launch.stop_grace_s
    assert service["KillMode"] == "mixed", "workers must live until the gateways have drained"


def test_what_the_server_keeps_lies_where_the_unit_may_write() -> None:
    places = dict(re.findall(r"^Environment=(\w+)=(%[CS]/twostroke)", UNIT.read_text(), re.MULTILINE))
    assert places == {"HF_HOME": "%C/twostroke", "TRITON_CACHE_DIR": "%C/twostroke", "HOME": "%S/twostroke"}
    service = settings_of("Service")
    assert service["CacheDirectory"] == service["StateDirectory"] == "twostroke"


def test_the_launcher_tells_when_it_serves_lives_and_stops(systemd: Systemd, tmp_path: Path) -> None:
    http_address = f"127.0.0.1:{free_port()}"
    environment = os.environ | {"NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6))}
    settings = [f"gateway.http_address={http_address}", ONE_LAYER, "model.name=mine"]
    with running_cluster(tmp_path, *settings, env=environment, is_warm=True):
        assert systemd.receive() == "READY=1\nSTATUS=serving mine"
        with urllib.request.urlopen(f"http://{http_address}/ready", timeout=TIMEOUT_S) as answer:
            assert answer.status == 200
        signs = [systemd.receive_at() for _ in range(4)]
        assert {message for _, message in signs} == {"WATCHDOG=1"}
        assert signs[-1][0] - signs[0][0] > WATCHDOG_S, "every half of the time, not as fast as it can"
    messages = [systemd.receive()]
    while messages[-1] == "WATCHDOG=1":
        messages.append(systemd.receive())
    assert messages[-1] == "STOPPING=1"


@pytest.mark.parametrize(
    ("variable", "sentence"),
    [
        ("NOTIFY_SOCKET=/nowhere/it", "NOTIFY_SOCKET '/nowhere/it' cannot be reached: No such file or directory"),
        ("WATCHDOG_USEC=soon", "WATCHDOG_USEC is 'soon', not a number above 0"),
    ],
)
def test_what_systemd_would_not_say_ends_the_start_with_one_sentence(
    variable: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*variable.split("="))
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}"):  # the launcher ends with it, as with any other
        asyncio.run(ServiceManager(service_manager_of_environment()).ready("here"))


def test_a_socket_without_a_file_is_reached() -> None:
    name = f"twostroke-{secrets.token_hex(8)}"
    systemd = Systemd(f"\0{name}")
    asyncio.run(ServiceManager(ServiceManagerEnvironment(f"@{name}", None, None)).ready("here"))
    assert systemd.receive() == "READY=1\nSTATUS=here"
    systemd.socket.shutdown(socket.SHUT_RD)
    systemd.socket.close()


@pytest.mark.parametrize("is_read", [True, False])
def test_a_full_socket_is_waited_for_and_ends_no_start(is_read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_manager, "RETRY_S", 0.01)
    monkeypatch.setattr(service_manager, "READY_TIMEOUT_S", TIMEOUT_S if is_read else 0.05)
    name = f"twostroke-{secrets.token_hex(8)}"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listening.bind(f"\0{name}")
    listening.settimeout(TIMEOUT_S)
    manager = ServiceManager(ServiceManagerEnvironment(f"@{name}", None, None))
    with contextlib.suppress(BlockingIOError):
        while True:
            manager._send("full")

    async def start() -> None:
        ready = asyncio.create_task(manager.ready("here"))
        await asyncio.sleep(0.02)
        while is_read and not ready.done():
            await asyncio.to_thread(listening.recv, 4096)
            await asyncio.sleep(0.02)
        await ready

    asyncio.run(asyncio.wait_for(start(), TIMEOUT_S))
    assert manager._is_ready.is_set() == is_read
    listening.close()


def test_signs_of_life_are_for_the_process_that_is_asked_for_them() -> None:
    """A launcher that a service starts inherits its environment."""
    for pid, has_interval in ((None, True), (os.getpid(), True), (1, False)):
        manager = ServiceManager(ServiceManagerEnvironment("/somewhere", 1000, pid))
        assert (manager._interval_s is not None) == has_interval
