"""The web page to try the server at /, and the figures for its live view at /stats."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response
from typing_extensions import TypedDict

from services.gateway.apis.server.page import load_page
from services.gateway.core.request_service import RequestService
from services.gateway.link.worker_load import CacheLoad, RequestLoad, ServiceLoad, WorkerLoad


class Stats(TypedDict):
    """The current figures, at most a second old."""

    model: str
    unready_reason: str | None
    requests: RequestLoad | None
    kv_cache: CacheLoad | None
    services: tuple[ServiceLoad, ...] | None


def page_routes(service: RequestService, worker_load: WorkerLoad) -> APIRouter:
    """The routes of one gateway's web page."""
    router = APIRouter(tags=["Page"])
    page = load_page()

    @router.get("/", include_in_schema=False)
    async def get_page() -> Response:
        return Response(page.body, headers=page.headers)

    @router.get("/stats")
    async def stats() -> Stats:
        """How busy the server is. What a worker or the launcher does not answer is null."""
        load = await worker_load.read()
        return {
            "model": service.names.first,
            "unready_reason": service.unready_reason(),
            "requests": load.requests,
            "kv_cache": load.kv_cache,
            "services": load.services,
        }

    return router
