"""`WarmProcess`: `python -m MODULE ARGUMENTS...`, forked from a process that has already imported all modules.

Importing torch and transformers takes most of a service's start. The process looks like one started by `subprocess`:
it is a child of the test, with the same command line, environment, standard streams, signals and exit status. But it
shares memory with `tests.support.warm_server`, and its interpreter ends without unloading its modules, so tests that
measure all memory of a service, or ask whether its interpreter ends, start it by `subprocess`. Its workers do not spin
while they wait for each other unless `SPINS` is in the environment.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
WARM_SERVER = "tests.support.warm_server"
SPINS = "TWOSTROKE_TEST_SPINS"  # in the environment of processes that wait for their peers as they do for users
MODULES = "TWOSTROKE_TEST_MODULES"  # in the environment of a launcher: what runs in place of some modules, as JSON
EARLY = "TWOSTROKE_TEST_EARLY"  # in the environment of a launcher whose services are started as early as for users
MAX_COMMAND_BYTES = 1 << 14  # length of the command line of a forked process
MAX_MESSAGE_BYTES = 1 << 17
MAX_POLL_S = 0.02
START_TIMEOUT_S = 90.0  # of a process; the first start waits for the imports
READY = b"ready"  # a server's first message, after its imports
RUN_TIMEOUT_S = 100.0
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Surroundings:
    """What a wrapper changes for the command that it executes."""

    namespaces: list[int]  # open files, in the order in which a process can join them
    cores: list[int]
    max_files: list[int]  # the soft and the hard limit

    @classmethod
    def of(cls, wrapper: Sequence[str]) -> Surroundings:
        """Executes it. The caller closes the files."""
        with subprocess.Popen([*wrapper, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as example:
            example.stdin.write(b"\n")  # cat answers when the wrapper has done its work
            example.stdin.flush()
            assert example.stdout.readline(), f"{wrapper} executes nothing"
            paths = [Path(f"/proc/{example.pid}/ns/{kind}") for kind in ("user", "mnt")]
            other = [path for path in paths if not path.samefile(f"/proc/self/ns/{path.name}")]
            return cls(
                [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in other],
                sorted(os.sched_getaffinity(example.pid)),
                list(resource.prlimit(example.pid, resource.RLIMIT_NOFILE)),
            )


class WarmServer:
    """A client of one `tests.support.warm_server`, which reads the other end of `connection`."""

    def __init__(
        self, connection: socket.socket, *, is_ready: bool = False, timeout_s: float = START_TIMEOUT_S
    ) -> None:
        """`is_ready`: whether it has imported everything; otherwise its first message says when it has."""
        connection.settimeout(timeout_s)
        self._connection = connection
        self._lock = threading.Lock()
        self._is_ready = is_ready
        self._number = 0  # of the newest request

    def start(
        self,
        arguments: Sequence[str],
        *,
        stdout: int,
        stderr: int,
        env: Mapping[str, str] | None,
        start_new_session: bool,
        pass_fds: Sequence[int] | Mapping[int, int],
        wrapper: Sequence[str],
    ) -> int:
        """Starts `python ARGUMENTS...` as a child of this process; returns its process id.

        `pass_fds`: files that it gets, by their number there if they have another one here.

        Raises `TimeoutError` if the server takes too long. The next call waits for it again, and a process that comes
        too late is killed: on a very busy machine one test fails, not all that follow it in this process.
        """
        around = Surroundings.of(wrapper) if wrapper else None
        namespaces = around.namespaces if around else []
        message = {
            "number": 0,
            "arguments": list(arguments),
            "env": dict(os.environ if env is None else env),
            "start_new_session": start_new_session,
            "pass_fds": list(pass_fds),
            "around": around and {**vars(around), "namespaces": len(namespaces)},
        }
        with self._lock, open(os.devnull) as nothing:
            _adopt_orphans(True)  # the server orphans the new process, so that it becomes our child
            try:
                if not self._is_ready:
                    assert self._receive() == READY
                    self._is_ready = True
                self._number = message["number"] = self._number + 1
                passed = pass_fds.values() if isinstance(pass_fds, Mapping) else pass_fds
                files = [nothing.fileno(), stdout, stderr, *namespaces, *passed]
                socket.send_fds(self._connection, [json.dumps(message).encode()], files)
                while True:
                    number, pid = map(int, self._receive().split())
                    if number == self._number:
                        return pid
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            finally:
                _adopt_orphans(False)
                for namespace in namespaces:
                    os.close(namespace)

    def _receive(self) -> bytes:
        message = self._connection.recv(MAX_MESSAGE_BYTES)
        if not message:
            raise RuntimeError("the process that forks services has ended")
        return message


class WarmProcess:
    """Like `subprocess.Popen` for a command `[sys.executable, "-m", MODULE, ...]`, with an empty standard input.

    `wrapper` is a command that executes another one in its own process. What it changes for that (namespaces, cores and
    the number of files) changes for the forked process, too.
    """

    def __init__(
        self,
        server: WarmServer,
        command: Sequence[str],
        *,
        stdout: int = 1,
        stderr: int = 2,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
        pass_fds: Sequence[int] | Mapping[int, int] = (),
        wrapper: Sequence[str] = (),
    ) -> None:
        python, *arguments = command
        assert python == sys.executable and arguments[0] == "-m"
        self.args = command
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self.pid = server.start(
            arguments,
            stdout=stdout,
            stderr=stderr,
            env=env,
            start_new_session=start_new_session,
            pass_fds=pass_fds,
            wrapper=wrapper,
        )

    def poll(self) -> int | None:
        """The exit status, or the negative number of the signal that ended it; None while it runs."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end; returns the same as `poll`. Raises `subprocess.TimeoutExpired` after `timeout` seconds."""
        if timeout is None:
            with contextlib.suppress(ChildProcessError):  # another thread has already read the status
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        deadline = time.monotonic() + (timeout or 0.0)
        while (status := self.poll()) is None:
            if timeout is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(MAX_POLL_S)
        return status

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)


def run_warm(
    *arguments: str, env: Mapping[str, str] | None = None, timeout_s: float = RUN_TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Runs `python -m ARGUMENTS...` to its end; returns the same as `subprocess.run`."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        command = [sys.executable, "-m", *arguments]
        process = WarmProcess(warm_server(), command, stdout=stdout.fileno(), stderr=stderr.fileno(), env=env)
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        for file in (stdout, stderr):
            file.seek(0)
        return subprocess.CompletedProcess(command, status, stdout.read(), stderr.read())


def end_process(status: int) -> None:
    """Ends this process as the interpreter would, but unloads nothing. Returns only if its output cannot be written."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):  # then the interpreter says so
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


@functools.cache
def warm_server() -> WarmServer:
    """The server of this test process. It starts at first use and ends with the test process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        padding = " " * MAX_COMMAND_BYTES  # its children write their command lines over this one
        command = [sys.executable, "-m", WARM_SERVER, str(theirs.fileno()), padding]
        process = subprocess.Popen(command, cwd=REPOSITORY, pass_fds=[theirs.fileno()])

    def stop() -> None:
        ours.close()
        process.wait()

    atexit.register(stop)
    return WarmServer(ours)


def _adopt_orphans(does: bool) -> None:
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, int(does), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
