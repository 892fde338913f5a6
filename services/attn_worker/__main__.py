"""`python -m services.attn_worker --config FILE`: the process that owns the KV cache."""

from __future__ import annotations

from services.common.process import begin_service

begin_service()

from services.common.early_start import await_arguments  # noqa: E402

await_arguments("torch")  # the rest when the GPU is being opened

import sys  # noqa: E402

from services.common.cli import parse_service_args  # noqa: E402
from services.common.logs import configure_logs  # noqa: E402
from services.common.open_gpu import open_gpu_ahead  # noqa: E402
from services.common.process import import_at_low_priority, importing  # noqa: E402
from services.rpc.server import run_service, serve  # noqa: E402


def main() -> None:
    """Runs the attention worker until it is asked to stop. Reads its command line."""
    config, options = parse_service_args("services.attn_worker", sys.argv[1:])
    configure_logs(config.log, "attn_worker", options.error_file)
    if options.opens_gpu:
        open_gpu_ahead(config.attention.device)
    if options.standby is not None:
        import_at_low_priority("services.attn_worker.service")
    with importing():
        from services.attn_worker.service import AttentionWorker
    run_service(serve(lambda: AttentionWorker(config, options)))


if __name__ == "__main__":
    main()
