"""GET /metrics: the Prometheus metrics of this gateway process."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder


def metrics_routes(registry: CollectorRegistry) -> APIRouter:
    """The metrics of one gateway process. With several processes at one port, scrape `gateway.metrics_address`."""
    router = APIRouter(tags=["Server"])

    @router.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "The metrics"}},
    )
    def metrics(request: Request) -> Response:  # not a coroutine, so it runs in a thread
        """Prometheus metrics, as text."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), media_type=content_type)

    return router
