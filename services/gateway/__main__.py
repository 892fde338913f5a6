"""The gateway process: `python -m services.gateway --config FILE [--set section.key=value ...]`."""

from __future__ import annotations

import asyncio
import gc
import os
import sys

from services.common.cli import parse_service_args
from services.common.logs import configure_logs
from services.common.server import run_service


def main() -> None:
    config = parse_service_args("services.gateway", sys.argv[1:])
    configure_logs(config.log, "gateway")
    # transformers imports torch where it can: 2 s and 250 MB, and nothing here needs it.
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # it would advise to install torch
    from services.gateway.service import serve

    gc.freeze()  # modules live as long as the process; to look at them again and again would hold up all streams
    drain = asyncio.Event()
    run_service(serve(config, drain), drain)


if __name__ == "__main__":
    main()
