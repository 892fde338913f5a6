"""`LoadReport`: a load balancer that asks for it reads the server's load in a header of each answer.

The headers and their forms are those of ORCA (Open Request Cost Aggregation) as Envoy reads it, the names of the
metrics vLLM's.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.http.headers import header_values
from services.gateway.http.json_pieces import json_line
from services.gateway.link.worker_load import Load, WorkerLoad

ASKING_HEADER, HEADER = b"endpoint-load-metrics-format", b"endpoint-load-metrics"
FORMATS = (b"TEXT", b"JSON")


class LoadReport:
    """An ASGI middleware within `Authorize`."""

    def __init__(self, app: ASGIApp, worker_load: WorkerLoad) -> None:
        self._app = app
        self._worker_load = worker_load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = header_values(scope["headers"], ASKING_HEADER)
        form = asked[-1].strip().upper() if asked else b""
        if form not in FORMATS:
            await self._app(scope, receive, send)
            return

        async def send_with_load(message: Message) -> None:
            if message["type"] == "http.response.start" and (metrics := _metrics(await self._worker_load.read())):
                message["headers"] = [*message.get("headers", ()), (HEADER, form + b" " + _written(form, metrics))]
            await send(message)

        await self._app(scope, receive, send_with_load)


def _metrics(load: Load) -> dict[str, float]:
    """What is known of the load."""
    metrics: dict[str, float] = {}
    if (cache := load.kv_cache) is not None and cache.num_blocks:
        metrics["kv_cache_usage_perc"] = 1 - cache.num_free_blocks / cache.num_blocks
    if (requests := load.requests) is not None:
        metrics |= {"num_requests_running": requests.num_running, "num_requests_waiting": requests.num_waiting}
    return metrics


def _written(form: bytes, metrics: dict[str, float]) -> bytes:
    if form == b"JSON":
        return json_line({"named_metrics": metrics})
    return ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items()).encode()
