"""A server takes over the sockets that systemd holds for it, and loses no connection while it is not there.

The tests are systemd: they listen, pass the sockets on, and start the server again.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from services.common.config import load_config
from services.common.early_start import EARLY_FLAG
from services.common.errors import ConfigError
from services.launch import passed_sockets
from services.launch.passed_sockets import address_of, check_same_address, take_passed_sockets, with_passed_sockets
from tests.deploy.compose_file import DEPLOY
from tests.support.cluster import STOP_TIMEOUT_S, Cluster, children_of, free_port, running_cluster
from tests.support.models import ONE_LAYER
from tests.support.warm_process import EARLY

UNITS = DEPLOY / "systemd"
TIMEOUT_S = 60.0
LAUNCHER = "tests.support.workers.activated_launcher"


def listening(port: int = 0, *, shares_port: bool = False) -> socket.socket:
    """A socket as systemd opens it."""
    return socket.create_server(("127.0.0.1", port), backlog=256, reuse_port=shares_port)


@contextmanager
def activated(
    directory: Path, *listeners: socket.socket, settings: tuple[str, ...] = (), is_early: bool = False
) -> Iterator[Cluster]:
    directory.mkdir(exist_ok=True)
    names = ":".join("http" for _ in listeners)
    env = os.environ | {"LISTEN_FDS": str(len(listeners)), "LISTEN_FDNAMES": names}
    if is_early:
        env[EARLY] = "1"
    settings = (ONE_LAYER, "model.name=mine", *settings)
    options = {"is_warm": True, "launcher": LAUNCHER, "env": env, "listeners": listeners}
    with running_cluster(directory, *settings, **options) as cluster:
        yield cluster


def complete(address: tuple[str, int], *, begun: threading.Event | None = None) -> int:
    """One request on a connection of its own; returns the status. Raises OSError if the connection is refused or ends.

    `begun` is set when the request has been sent.
    """
    connection = http.client.HTTPConnection(*address, timeout=TIMEOUT_S)
    body = json.dumps({"model": "mine", "prompt": "San Francisco is a", "max_tokens": 2})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    if begun is not None:
        begun.set()
    try:
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def test_who_connects_while_the_server_loads_or_is_restarted_is_answered(tmp_path: Path) -> None:
    """By new connections alone, one after the other in each of two threads, from before the first start to after the
    second one."""
    with listening() as listener, ThreadPoolExecutor() as threads:
        address = listener.getsockname()
        begun, is_over = threading.Event(), threading.Event()
        first = threads.submit(complete, address, begun=begun)
        assert begun.wait(TIMEOUT_S), "connected, though no process of a server is there"
        statuses: list[int] = []

        def ask_on() -> None:
            while not is_over.is_set():
                statuses.append(complete(address))

        with activated(tmp_path / "first", listener) as cluster:
            assert first.result(TIMEOUT_S) == 200
            asking = [threads.submit(ask_on) for _ in range(2)]
            until(lambda: len(statuses) >= 4, asking)
            cluster.process.send_signal(signal.SIGTERM)  # as systemd does
            assert cluster.process.wait(STOP_TIMEOUT_S) == 0
        before, waiting = len(statuses), threads.submit(complete, address)
        with activated(tmp_path / "second", listener):
            assert waiting.result(TIMEOUT_S) == 200
            until(lambda: len(statuses) >= before + 4, asking)
            is_over.set()
            for each in asking:
                each.result(TIMEOUT_S)
    assert set(statuses) == {200}


def until(is_true: Callable[[], bool], running: list[Future[None]]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_true():
        for each in running:
            if each.done():
                each.result()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_each_gateway_has_a_socket_and_one_that_is_killed_loses_no_connection_that_waits(tmp_path: Path) -> None:
    port = free_port()
    with ExitStack() as opened:
        listeners = [opened.enter_context(listening(port, shares_port=True)) for _ in range(2)]
        settings = ("launch.gateway_processes=2", f"gateway.address=127.0.0.1:{free_port()}")
        with activated(tmp_path, *listeners, settings=settings) as cluster, ThreadPoolExecutor(16) as threads:
            gateway = cluster.pid_of("gateway")
            os.kill(gateway, signal.SIGSTOP)  # it accepts nothing any more
            answers = [threads.submit(complete, ("127.0.0.1", port)) for _ in range(16)]
            until(lambda: any(each.done() for each in answers), [])
            os.kill(gateway, signal.SIGKILL)
            assert {each.result(TIMEOUT_S) for each in answers} == {200}
            assert complete(("127.0.0.1", port)) == 200


def test_no_process_waits_for_a_gateway_that_inherits_a_socket(tmp_path: Path) -> None:
    with listening() as listener, activated(tmp_path, listener, is_early=True) as cluster:
        lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in children_of(cluster.process.pid)]
        assert sorted(line.split("\0")[2] for line in lines if EARLY_FLAG in line) == [
            "services.attn_worker",
            "services.dense_worker",
        ]
        assert complete(listener.getsockname()) == 200


def test_the_sockets_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as listener:
        pass_on(monkeypatch, listener)
        [passed] = take_passed_sockets()
        with passed:
            assert passed.getsockname() == listener.getsockname() and not passed.getblocking()
            assert not passed.get_inheritable(), "only gateways get it"
            config = with_passed_sockets(load_config(None, ["launch.gateway_processes=auto"]), [passed])
            assert config.gateway.http_address == address_of(passed)
            assert config.launch.gateway_processes == 1
        assert "LISTEN_FDS" not in os.environ and take_passed_sockets() == []


def test_without_systemd_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None)
    assert with_passed_sockets(config, take_passed_sockets()) is config
    monkeypatch.setenv("LISTEN_FDS", "0")
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    assert take_passed_sockets() == []


def pass_on(monkeypatch: pytest.MonkeyPatch, *sockets: socket.socket | int, **environment: str) -> None:
    """Lets the sockets be the ones that were passed to this process. They must be next to each other."""
    descriptors = [each if isinstance(each, int) else each.fileno() for each in sockets]
    copies = []
    first = next(number for number in range(200, 250) if not os.path.exists(f"/proc/self/fd/{number}"))
    for number, descriptor in enumerate(descriptors, start=first):
        copies.append(os.dup2(descriptor, number))
    monkeypatch.setattr(passed_sockets, "FIRST_DESCRIPTOR", first)
    names = {"LISTEN_FDS": str(len(copies)), "LISTEN_PID": str(os.getpid())} | environment
    for name, value in names.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"LISTEN_FDS": "two"}, "LISTEN_FDS is 'two', not a number"),
        ({"LISTEN_FDNAMES": "http:http"}, "LISTEN_FDS is 1 and LISTEN_FDNAMES has 2 names"),
        (
            {"LISTEN_FDNAMES": "twostroke.socket"},
            "systemd passes a socket named 'twostroke.socket', and only 'http' is known: set FileDescriptorName=http in"
            " the socket unit",
        ),
        (
            {"LISTEN_FDNAMES": "grpc"},
            "systemd passes a socket named 'grpc', and gRPC's library opens its port itself: take it out of the socket"
            " unit",
        ),
    ],
)
def test_an_environment_that_says_something_else_is_refused(
    environment: dict[str, str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listening() as listener:
        pass_on(monkeypatch, listener, **environment)
        with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}$"):
            take_passed_sockets()


def connected() -> socket.socket:
    with listening() as listener:
        return socket.create_connection(listener.getsockname())


@pytest.mark.parametrize(
    ("opened", "sentence"),
    [
        (lambda: socket.socket(type=socket.SOCK_DGRAM), "is no stream of TCP or a Unix socket: .* ListenStream="),
        (lambda: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), "is no stream of TCP or a Unix socket"),
        (tempfile.TemporaryFile, "is not an open socket: Socket operation on non-socket"),
        (connected, "does not listen: .* Accept=yes"),
    ],
)
def test_what_is_no_listening_socket_is_refused(
    opened: Callable[[], socket.socket], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened() as wrong:
        pass_on(monkeypatch, wrong.fileno())
        with pytest.raises(ConfigError, match=rf"^descriptor \d+, which systemd passes, {sentence}"):
            take_passed_sockets()


def test_a_number_larger_than_that_of_the_sockets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as listener:
        pass_on(monkeypatch, listener, LISTEN_FDS="2")
        with pytest.raises(ConfigError, match="is not an open socket: Bad file descriptor"):
            take_passed_sockets()


def test_sockets_at_different_addresses_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as one, listening() as other:
        pass_on(monkeypatch, one, other)
        with pytest.raises(ConfigError, match=f"{address_of(one)} and {address_of(other)}, and the HTTP API has one"):
            take_passed_sockets()


@pytest.mark.parametrize("pid", ["1", None])
def test_sockets_of_another_process_are_not_used_and_the_log_says_so(
    pid: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with listening() as listener:
        pass_on(monkeypatch, listener)
        monkeypatch.setenv("LISTEN_PID", pid) if pid else monkeypatch.delenv("LISTEN_PID")
        assert take_passed_sockets() == []
    logged = "".join(capsys.readouterr())
    assert "passed to another process" in logged and f"this process is {os.getpid()}" in logged


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["gateway.http_address=127.0.0.1:9"], r"is 127\.0\.0\.1:9, and systemd listens at 127\.0\.0\.1:\d+ for it"),
        (["launch.gateway_processes=3"], r"processes is 3, .* which are 1: set it to 1, or repeat ListenStream=127"),
        (["launch.services=['dense_worker', 'attn_worker']"], "a socket for the gateway, and launch.services is dense"),
    ],
)
def test_a_config_that_contradicts_the_sockets_is_refused(settings: list[str], sentence: str) -> None:
    with listening() as listener, pytest.raises(ConfigError, match=sentence):
        with_passed_sockets(load_config(None, settings), [listener])


def test_the_same_address_by_another_name_is_no_contradiction(tmp_path: Path) -> None:
    with listening() as listener, socket.socket(socket.AF_UNIX) as unix:
        port = listener.getsockname()[1]
        check_same_address(load_config(None, [f"gateway.http_address=localhost:{port}"]), address_of(listener))
        unix.bind(str(tmp_path / "http"))
        check_same_address(load_config(None, [f"gateway.http_address=unix:{tmp_path}/http"]), address_of(unix))


def test_systemd_accepts_the_socket_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    for file in UNITS.iterdir():
        shutil.copy(file, tmp_path)
    service = tmp_path / "twostroke.service"
    text = re.sub("^ExecStart=[^ ]+", f"ExecStart={sys.executable}", service.read_text(), flags=re.MULTILINE)
    service.write_text(text)  # a program that exists here
    unit = tmp_path / "twostroke.socket"
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert checked.returncode == 0 and "twostroke" not in checked.stderr, checked.stderr
    unit.write_text(unit.read_text().replace("ListenStream=", "ListenStraem="))
    checked = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert "ListenStraem" in checked.stderr, "it would find a mistake"


def test_the_socket_unit_passes_what_the_server_expects() -> None:
    lines = (UNITS / "twostroke.socket").read_text().splitlines()
    assert f"FileDescriptorName={passed_sockets.NAME}" in lines
    assert f"ListenStream={load_config(None).gateway.http_address}" in lines
