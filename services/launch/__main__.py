"""`python -m services.launch`: all services on one machine; `... ctl` calls a running launcher, see `ctl.py`."""

from __future__ import annotations

import signal
import sys

from services.common.process import end_at_signals

if sys.argv[1:2] == ["ctl"]:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports below shows no traceback
else:
    end_at_signals()

import asyncio

from services.common.logs import configure_logs
from services.launch import ctl
from services.launch.arguments import parse_args
from services.launch.service import Launcher
from services.rpc.server import run_service, serve


def main() -> None:
    """Runs the launcher, or with `ctl` as its first argument a command for a running one."""
    if sys.argv[1:2] == ["ctl"]:
        sys.exit(ctl.main(sys.argv[2:]))
    config, arguments = parse_args(sys.argv[1:])
    configure_logs(config.log, "launch")
    drain = asyncio.Event()
    run_service(serve(lambda: Launcher(config, arguments, drain)), drain)


if __name__ == "__main__":
    main()
