"""A process that has imported all services, and forks one whenever a `WarmServer` asks for it.

It has also made what is the same in all of them. It has one thread and has never called gRPC or torch, which do not
survive a fork. A launcher that is forked from it gets its own server of this kind, because the launcher's services must
be its children.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from services.common.process import importing, set_up_grpc

with importing():
    set_up_grpc()
    import services.attn_worker.service
    import services.channel.shm as shm
    import services.channel.turns as turns
    import services.dense_worker.backends.torch_backend
    import services.dense_worker.service
    import services.gateway.service
    import services.launch.service  # noqa: F401
    from services.common.config import EMBEDDED_MODEL
    from services.common.model_config import load_model_config
    from services.launch import early_services
    from tests.support.shared_routes import prepare_routes, share_routes

    share_routes()
    prepare_routes()
    load_model_config(EMBEDDED_MODEL)  # imports modules for the model's family

from tests.support.warm_process import (
    EARLY,
    MAX_MESSAGE_BYTES,
    READY,
    SPINS,
    WARM_SERVER,
    WarmProcess,
    WarmServer,
    end_process,
)

LAUNCHERS = (  # modules that start services
    "services.launch",
    "services.console",
    "tests.support.workers.activated_launcher",
    "tests.support.workers.hub_user",
    "tests.support.workers.replacing_launcher",
)
MAX_FILES = 1024
MAX_PASSED_FILES = 8  # beside the standard streams, namespaces too


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.send(READY)
    while True:
        become_next(connection)
        if sys.argv[0] not in LAUNCHERS:
            break
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            theirs.close()
            start_services_from(WarmServer(ours, is_ready=True))
            break
        ours.close()
        connection = theirs
        name_process(["-m", WARM_SERVER])
    run_to_the_end()


def run_to_the_end() -> None:
    """Runs the module `sys.argv[0]`, and ends the process as the interpreter would, but leaves all modules loaded: to
    unload those that a service imports takes 0.3 s. Returns or raises only if there is an error to report.
    """
    status = 0
    try:
        sys.modules.pop(sys.argv[0], None)  # runpy warns of a module that something else has imported, too
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, int):
            status = end.code
        elif end.code is not None:
            print(end.code, file=sys.stderr)
            status = 1
    end_process(status)


def become_next(connection: socket.socket) -> None:
    """Forks a process for each request at `connection`. Returns only in the new processes, with `sys.argv` set."""
    assert threading.active_count() == 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C must reach only the tests and the services
    while True:
        message, files, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 3 + MAX_PASSED_FILES)
        if not message:
            os._exit(0)
        request = json.loads(message)
        number = request.pop("number")
        reader, writer = os.pipe()
        if not (middle := os.fork()):
            middle = os.getpid()
            if pid := os.fork():
                os.write(writer, str(pid).encode())
                os._exit(0)  # so that the process that asked becomes the new one's parent
            break
        os.waitpid(middle, 0)
        connection.send(b"%d %s" % (number, os.read(reader, 100)))
        for file in (*files, reader, writer):
            os.close(file)
    while os.getppid() == middle:
        time.sleep(0.0005)
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
    first_free = max(*files, reader, writer, *request["pass_fds"]) + 1
    passed = [fcntl.fcntl(file, fcntl.F_DUPFD, first_free) for file in files[3:]]
    connection.detach()
    os.closerange(3, min([*passed, MAX_FILES]))
    os.closerange(max([*passed, 2]) + 1, MAX_FILES)
    take_on(passed, **request)


def take_on(
    passed: Sequence[int],
    arguments: Sequence[str],
    env: Mapping[str, str],
    start_new_session: bool,
    pass_fds: Sequence[int],
    around: Mapping[str, Any] | None,
) -> None:
    """Gives this process the arguments, environment, session, files and surroundings of `python ARGUMENTS...`."""
    if around is not None:
        enter(passed[: around["namespaces"]], around["cores"], around["max_files"])
        passed = passed[around["namespaces"] :]
    for file, number in zip(passed, pass_fds, strict=True):
        os.dup2(file, number)
        os.close(file)
    if start_new_session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    name_process(arguments)
    sys.argv = list(arguments[1:])  # after "-m"
    if SPINS not in env:
        # Several clusters share the cores: who waits gives its core away at once, and looks again after a layer's time.
        for waits in (shm, turns):
            waits.SPIN_S, waits.YIELD_S, waits.NAP_S = 0.0, 0.0, 200e-6


def enter(namespaces: Sequence[int], cores: Sequence[int], max_files: tuple[int, int]) -> None:
    """Joins the namespaces, which are open files, and limits this process to the cores and the number of files."""
    directory, libc = os.getcwd(), ctypes.CDLL(None, use_errno=True)
    for namespace in namespaces:
        if libc.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(namespace)
    os.chdir(directory)  # a mount namespace has its own root
    os.sched_setaffinity(0, cores)
    resource.setrlimit(resource.RLIMIT_NOFILE, tuple(max_files))


def name_process(arguments: Sequence[str]) -> None:
    """Lets the kernel show `python ARGUMENTS...` as this process's command line."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    command_line = b"".join(argument.encode() + b"\0" for argument in (sys.executable, *arguments))
    assert len(command_line) < end - start, f"no room for {command_line!r}"
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, command_line, len(command_line))


def start_services_from(server: WarmServer) -> None:
    """Makes the launcher, which this process will become, start its services with `server`."""
    def start(command: Sequence[str], stdin: int, **options: Any) -> WarmProcess:
        assert stdin == subprocess.DEVNULL
        return WarmProcess(server, command, **options)

    early_services.subprocess = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]
    if EARLY not in os.environ:
        early_services.MODULES = ()


main()
