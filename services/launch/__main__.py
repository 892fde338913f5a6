"""`python -m services.launch`: all services on one machine; `... ctl` calls a running launcher, see `ctl.py`."""

from __future__ import annotations

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports below ends the process without a traceback

import asyncio  # noqa: E402
import sys  # noqa: E402

from services.common.logs import configure_logs  # noqa: E402
from services.launch import ctl  # noqa: E402
from services.launch.arguments import parse_args  # noqa: E402
from services.launch.service import Launcher  # noqa: E402
from services.rpc.server import run_service, serve  # noqa: E402


def main() -> None:
    if sys.argv[1:2] == ["ctl"]:
        sys.exit(ctl.main(sys.argv[2:]))
    config, arguments = parse_args(sys.argv[1:])
    configure_logs(config.log, "launch")
    drain = asyncio.Event()
    run_service(serve(lambda: Launcher(config, arguments, drain)), drain)


if __name__ == "__main__":
    main()
