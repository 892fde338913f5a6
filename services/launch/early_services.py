"""`EarlyServices`: processes of all services, started before the launcher imports its own modules.

They import theirs, torch above all, while the launcher imports, reads its command line and looks at the model, and are
then told what to do. What a restart, a further worker or a further gateway needs is started as always.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path

from services.common.early_start import EARLY_FLAG
from services.common.process import anonymous_bytes, holding_back_signals

MODULES = ("services.dense_worker", "services.gateway", "services.attn_worker")  # first what takes longest


def start_process(
    module: str, arguments: Sequence[str], *, environment: Mapping[str, str] | None = None, files: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Starts `python -m MODULE ARGUMENTS...`, which gets `files` under the same numbers."""
    with holding_back_signals():  # asyncio would fork, which may crash the child because of gRPC's threads
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=files,
            start_new_session=True,  # so that Ctrl-C reaches only the launcher, which stops the services
        )


class EarlyService:
    """A process that waits for its command line at a socket, which is its lifeline afterwards."""

    def __init__(self, module: str) -> None:
        self._environment = dict(os.environ)
        self.line, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its_end:
            self.lifeline = its_end.fileno()  # in the process
            arguments = [EARLY_FLAG, str(self.lifeline), str(os.getpid())]
            self.process = start_process(module, arguments, files=[self.lifeline])

    def begin(self, arguments: Sequence[str], environment: Mapping[str, str] | None) -> None:
        """Tells it what to do. If it has died, nothing happens: who waits for its end learns that."""
        now, before = dict(os.environ) if environment is None else environment, self._environment
        changes = {name: now.get(name) for name in {*now, *before} if now.get(name) != before.get(name)}
        with contextlib.suppress(ConnectionError):
            self.line.send(json.dumps({"arguments": list(arguments), "environment": changes}).encode())

    def end(self) -> None:
        """Ends it, as nobody needs it."""
        self.line.close()
        self.process.kill()
        self.process.wait()


class EarlyServices:
    """One process of each of `MODULES`, until it is taken or ended. Used in one thread."""

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._services = {module: EarlyService(module) for module in modules}

    def take(self, module: str) -> EarlyService | None:
        """The process of this module, once; None if there is none."""
        return self._services.pop(module, None)

    def taken_bytes(self) -> int:
        """Memory of the host that they have so far, without pages of files."""
        return sum(anonymous_bytes(each.process.pid) for each in [*self._services.values()])

    def keep(self, modules: Set[str]) -> None:
        """Ends the others."""
        for module in self._services.keys() - modules:
            self._services.pop(module).end()


@contextlib.contextmanager
def starting_early(argv: Sequence[str]) -> Iterator[EarlyServices]:
    """The processes for a launcher with this command line. Those that it has not taken end with the context.

    There are none if it may need none: it prints help, `launch.services` is set, or the config is a pipe or no TOML.
    """
    early = EarlyServices(MODULES if _needs_all(argv) else ())
    try:
        yield early
    finally:
        early.keep(set())


def _needs_all(argv: Sequence[str]) -> bool:
    if importlib.util.find_spec("torch") is None or {"-h", "--help"} & {*argv}:
        return False
    if any(re.search(r"\bservices\s*=", text) for text in argv):
        return False
    return not any(_may_name_services(file) for file in _config_files(argv))


def _config_files(argv: Sequence[str]) -> Iterator[Path]:
    """What `--config` names; argparse takes beginnings of it, too."""
    for flag, following in itertools.pairwise([*argv, ""]):
        name, equals, value = flag.partition("=")
        if len(name) > len("--") and "--config".startswith(name):
            yield Path(value if equals else following)


def _may_name_services(config: Path) -> bool:
    try:
        if not config.is_file():  # what a pipe has can be read once
            return True
        return "services" in tomllib.loads(config.read_text(encoding="utf-8")).get("launch", ())
    except (OSError, ValueError, TypeError, RecursionError):  # which the launcher reports
        return True
