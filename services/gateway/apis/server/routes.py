"""Information about the server: /live, /health, /ready, /ping, /load, /version."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from services.gateway import __version__
from services.gateway.apis.server.schema import Health, Live, Load, Version
from services.gateway.core.request_service import RequestService


def server_routes(service: RequestService) -> APIRouter:
    """The routes with information about one gateway."""
    router = APIRouter(tags=["Server"])
    health_answers: dict[int | str, dict[str, Any]] = {200: {"model": Health}, 503: {"model": Health}}

    @router.get("/live")
    async def live() -> Live:
        """Whether the process lives, for a supervisor that restarts it. Says nothing about the workers."""
        return {"status": "ok"}

    @router.get("/health", response_class=Response, responses=health_answers)
    @router.get("/ready", response_class=Response, responses=health_answers)
    @router.get("/v1/health", response_class=Response, include_in_schema=False)
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

    return router
