"""`python -m services.dense_worker --config FILE`: the process that owns weights, scheduler and sampler."""

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
    """Runs the dense worker until it is asked to stop. Reads its command line."""
    config, options = parse_service_args("services.dense_worker", sys.argv[1:])
    configure_logs(config.log, "dense_worker", options.error_file)
    if options.opens_gpu:
        open_gpu_ahead(config.dense.device)
    if options.standby is not None:
        import_at_low_priority("services.dense_worker.service")
    with importing():
        from services.common.encoders.encoder_types import is_encoder
        from services.dense_worker.encoders.text.encoder_worker import EncoderWorker
        from services.dense_worker.service import DenseWorker
    worker = EncoderWorker if is_encoder(config.model.path) else DenseWorker
    run_service(serve(lambda: worker(config, options)))


if __name__ == "__main__":
    main()
