"""`python -m services.dense_worker.ranks --config FILE`: the process of another rank's dense shard."""

from __future__ import annotations

from services.common.process import begin_service

begin_service()

import sys  # noqa: E402

from services.common.cli import parse_service_args  # noqa: E402
from services.common.logs import configure_logs  # noqa: E402
from services.common.open_gpu import open_gpu_ahead  # noqa: E402
from services.common.process import import_at_low_priority, importing  # noqa: E402
from services.rpc.server import run_service, serve  # noqa: E402


def main() -> None:
    """Runs the shard until it is asked to stop. Reads its command line."""
    config, options = parse_service_args("services.dense_worker.ranks", sys.argv[1:])
    configure_logs(config.log, f"dense_worker.{options.rank}", options.error_file)
    if options.opens_gpu:
        open_gpu_ahead(config.dense.device)
    if options.standby is not None:
        import_at_low_priority("services.dense_worker.ranks.shard_service")
    with importing():
        from services.dense_worker.ranks.shard_service import ShardService
    run_service(serve(lambda: ShardService(config, options)))


if __name__ == "__main__":
    main()
