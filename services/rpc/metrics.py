"""Prometheus metrics of one process: its registry, the buckets of its histograms, and the scraper's HTTP server.

Every service creates one registry at start and passes it to the constructors of the parts that it measures. Metrics are
named `twostroke_<service>_<what>_<unit>`; `deploy/prometheus/metrics.md` lists them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, disable_created_metrics, start_http_server

from services import VERSION
from services.common.errors import ConfigError
from services.rpc.bindable import cannot_listen

log = structlog.get_logger()

PREFIX = "twostroke"
_OPENMETRICS = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8"
HAND_OVER_TIMEOUT_S = 120.0
HAND_OVER_RETRY_S = 0.2
# 1, 2, 5 in each decade: 1 ms to 100 s for a client's waiting times, from 10 µs for a step and its parts.
LATENCY_BUCKETS_S = (*(m / 10**e for e in (3, 2, 1) for m in (1, 2, 5)), 1, 2, 5, 10, 20, 50, 100)
STEP_BUCKETS_S = (*(m / 10**e for e in (5, 4, 3, 2, 1) for m in (1, 2, 5)), 1, 2, 5, 10)


def new_registry(service: str) -> CollectorRegistry:
    """A registry with the metrics of this process (memory, CPU, files) and its version."""
    disable_created_metrics()  # otherwise each counter and histogram has one more series, which nobody uses
    registry = CollectorRegistry()
    ProcessCollector(namespace=PREFIX, registry=registry)
    info = Gauge(
        "twostroke_build_info",
        "Always 1; the labels name service and versions.",
        ["service", "version", "python"],
        registry=registry,
    )
    info.labels(service, VERSION, platform.python_version()).set(1)
    return registry


def format_for(accept: str) -> str:
    """The format for a scraper with this header Accept, as a header for prometheus_client's `choose_encoder`.

    All names of metrics here are valid in both formats as they are, also vLLM's with their colons, which the library
    replaces in OpenMetrics unless it is told not to escape.
    """
    for each in accept.split(","):
        kind, *parameters = (part.strip() for part in each.split(";"))
        versions = [part for part in parameters if part.startswith("version=")]
        is_refused = any(part.startswith("q=") and not part[2:].strip("0.") for part in parameters)  # q=0
        if kind == "application/openmetrics-text" and versions in ([], ["version=1.0.0"]) and not is_refused:
            return _OPENMETRICS
    return "text/plain"


@contextlib.contextmanager
def serving_metrics(address: str | None, registry: CollectorRegistry, setting: str) -> Iterator[str | None]:
    """Serves the registry at `http://ADDRESS/metrics`, in threads of its own, as long as the context lasts.

    Yields the address with the real port. With the address None it serves nothing and yields None. Raises
    `ConfigError` if the address is in use, which names the setting: the key of the config that the address is from.
    """
    if address is None:
        yield None
        return
    host, _, port = address.rpartition(":")
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry)
    except OSError as error:
        raise cannot_listen(error, address, setting) from error
    server.set_app(_with_format(server.get_app()))
    try:
        bound = f"{host}:{server.server_port}"
        log.info("metrics", address=bound)
        yield bound
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _with_format(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """A WSGI application that answers in the format of `format_for`."""

    def answer(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        environ["HTTP_ACCEPT"] = format_for(environ.get("HTTP_ACCEPT", ""))
        return app(environ, start_response)

    return answer


async def serve_late_metrics(
    address: str | None, registry: CollectorRegistry, setting: str, has_taken_over: asyncio.Event
) -> None:
    """Like `serving_metrics`, until cancelled, for a process that replaces another.

    First waits until it has taken over, and then until the previous process has left the address. After
    `HAND_OVER_TIMEOUT_S` of that it logs an error and returns. With the address None it returns at once.
    """
    if address is None:
        return
    await has_taken_over.wait()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + HAND_OVER_TIMEOUT_S
    while True:
        try:
            with serving_metrics(address, registry, setting):
                await asyncio.Event().wait()
        except ConfigError as error:
            if loop.time() > deadline:
                log.error("no metrics of this process", error=str(error))
                return
        await asyncio.sleep(HAND_OVER_RETRY_S)
