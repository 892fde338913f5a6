"""Information about the server: /live, /health, /ready, /ping, /load, /version, /metrics."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from typing_extensions import TypedDict

from services.gateway import __version__
from services.gateway.core.request_service import RequestService
from services.gateway.metrics.all_processes import AllProcesses


class Live(TypedDict):
    """The process answers."""

    status: Literal["ok"]


class Health(TypedDict):
    """Whether requests can run; if not, `reason` says why."""

    status: Literal["ok", "unavailable"]
    reason: NotRequired[str]


class Load(TypedDict):
    """Requests that the gateway processes have accepted and not answered completely, those that wait included."""

    server_load: int


class Version(TypedDict):
    """The version of the server."""

    version: str


def server_routes(service: RequestService, measured: AllProcesses) -> APIRouter:
    """The routes with information about the server."""
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
        """How many requests the gateways are working on, for load balancers that ask vLLM."""
        return {"server_load": await measured.num_open_requests()}

    @router.get("/version")
    async def version() -> Version:
        """The version of the server."""
        return {"version": __version__}

    @router.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "The metrics"}},
    )
    async def metrics(request: Request) -> Response:
        """Prometheus metrics of all gateway processes, as text."""
        text, content_type = await measured.metrics(request.headers.get("accept", ""))
        return Response(text, media_type=content_type)

    return router
