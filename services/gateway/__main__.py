"""The gateway process: `python -m services.gateway --config FILE [--set section.key=value ...]`."""

from __future__ import annotations

from services.common.process import begin_service

begin_service()

from services.common.early_start import await_arguments  # noqa: E402
from services.common.process import give_back_large_blocks  # noqa: E402

give_back_large_blocks()
await_arguments("services.gateway.service")

import asyncio  # noqa: E402
import sys  # noqa: E402

from services.common.cli import parse_service_args  # noqa: E402
from services.common.logs import configure_logs  # noqa: E402
from services.common.process import collect_rarely, importing  # noqa: E402
from services.rpc.server import run_service, serve  # noqa: E402


def main() -> None:
    """Runs one gateway process until it is asked to stop, or has drained. Reads its command line."""
    config, options = parse_service_args("services.gateway", sys.argv[1:])
    configure_logs(config.log, "gateway", options.error_file)
    with importing():
        from services.gateway.service import Gateway
    drain = asyncio.Event()
    run_service(serve(lambda: Gateway(config, drain, options), lambda _: collect_rarely()), drain)


if __name__ == "__main__":
    main()
