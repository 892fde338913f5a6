"""Information about the server: /live, /health, /ready, /ping, /load, /version, /metrics."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from typing_extensions import TypedDict

from services.gateway import __version__
from services.gateway.core.request_service import RequestService


class Live(TypedDict):
    """The process answers."""

    status: Literal["ok"]


class Health(TypedDict):
    """Whether requests can run; if not, `reason` says why."""

    status: Literal["ok", "unavailable"]
    reason: NotRequired[str]


class Load(TypedDict):
    """Requests that one gateway process has accepted and not answered completely, those that wait included."""

    server_load: int


class Version(TypedDict):
    """The version of the server."""

    version: str


def server_routes(service: RequestService, registry: CollectorRegistry) -> APIRouter:
    """The routes with information about one gateway process.

    With several processes at one port, Prometheus scrapes `gateway.metrics_address` instead of `/metrics`.
    """
    router = APIRouter(tags=["Server"])
    health_answers: dict[int | str, dict[str, Any]] = {200: {"model": Health}, 503: {"model": Health}}

    @router.get("/live")
    async def live() -> Live:
        """Whether the process lives, for a supervisor that restarts it. Says nothing about the workers."""
        return {"status": "ok"}

    @router.get("/health", response_class=Response, responses=health_answers)
    @router.get("/ready", response_class=Response, responses=health_answers)
    @router.get("/v1/health", response_class=Response, include_in_schema=False)
    @router.get("/health_generate", response_class=Response, include_in_schema=False)  # SGLang's
    @router.get("/ping", response_class=Response, responses=health_answers)
    @router.post("/ping", response_class=Response, responses=health_answers)
    async def health() -> Response:
        """Whether requests can run now; if not, why. `/health`, `/ready` and SageMaker's `/ping` have one answer."""
        reason = service.unready_reason()
        if reason is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unavailable", "reason": reason}, 503)

    @router.get("/load")
    async def load() -> Load:
        """How many requests this gateway is working on, for load balancers that ask vLLM."""
        return {"server_load": service.num_open_requests}

    @router.get("/version")
    async def version() -> Version:
        """The version of the server."""
        return {"version": __version__}

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
