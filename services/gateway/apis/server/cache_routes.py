"""/flush_cache and /reset_prefix_cache, as SGLang and vLLM call it: new requests find nothing of earlier ones."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from services.common.config import GatewaySection
from services.common.errors import PermissionDenied
from services.gateway.core.request_service import RequestService
from services.gateway.http.errors import ERROR_RESPONSES


def cache_routes(service: RequestService, section: GatewaySection) -> APIRouter:
    """The route that makes the prefix cache forget what it has."""
    router = APIRouter(tags=["Server"], responses=ERROR_RESPONSES)
    admins = frozenset(section.weights_admins)

    @router.post("/flush_cache", response_class=PlainTextResponse)
    @router.post("/reset_prefix_cache", response_class=PlainTextResponse)
    async def flush_cache(request: Request) -> PlainTextResponse:
        """Requests that come later find no blocks of earlier ones; those that run go on. Takes no time."""
        caller = request.state.caller
        service.count_requests(1, caller)
        if caller.key is not None and caller.name not in admins:
            raise PermissionDenied(f"the API key {caller.name!r} may not flush the cache: see gateway.weights_admins")
        service.forget_prefixes()
        return PlainTextResponse("Cache flushed.\n")

    return router
