"""`python -m services.launch`: all services on one machine; `... ctl` calls a running launcher, see `ctl.py`."""

from __future__ import annotations

import signal
import sys

from services.common.process import end_at_signals

if sys.argv[1:2] == ["ctl"]:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports below shows no traceback
else:
    end_at_signals()

from collections.abc import Sequence

from services.launch.early_services import starting_early


def main() -> None:
    """Runs the launcher, or with `ctl` as its first argument a command for a running one."""
    if sys.argv[1:2] == ["ctl"]:
        from services.launch import ctl

        sys.exit(ctl.main(sys.argv[2:]))
    serve_all(sys.argv[1:])


def serve_all(
    argv: Sequence[str],
    program: str = "services.launch",
    chat_command: str = f"{sys.executable} -m services.gateway.chat_client",
) -> None:
    """Runs all services until SIGINT or SIGTERM. Ends the process.

    The user called this command `program`, and can talk to the server by `chat_command`.
    """
    with starting_early(argv) as early:
        import asyncio

        from services.common.logs import configure_logs
        from services.launch.arguments import parse_args
        from services.rpc.server import run_service, serve

        config, arguments = parse_args(argv, program)
        from services.launch.service import Launcher  # it takes most of a second, and --help does not need it

        configure_logs(config.log, "launch")
        drain = asyncio.Event()
        run_service(serve(lambda: Launcher(config, arguments, drain, chat_command, early)), drain)


if __name__ == "__main__":
    main()
