"""GET /metrics: what this gateway process tells Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder


def metrics_routes(registry: CollectorRegistry) -> APIRouter:
    """Of one gateway process; of several behind one port, each answers for itself (see `gateway.metrics_address`)."""
    router = APIRouter(tags=["Server"])

    @router.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "The metrics"}},
    )
    def metrics(request: Request) -> Response:  # no coroutine: it runs in a thread, beside the event loop
        """Prometheus metrics, as text."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), media_type=content_type)

    return router
