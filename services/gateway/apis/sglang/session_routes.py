"""POST /open_session and /close_session, as SGLang has them."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from services.gateway.apis.sglang.schema import CloseSessionBody, OpenSessionBody
from services.gateway.apis.sglang.sessions import Sessions
from services.gateway.apis.shared.routes import json_router
from services.gateway.core.request_service import RequestService


def session_routes(service: RequestService, sessions: Sessions) -> APIRouter:
    """The routes of one gateway; `/generate` takes `session_params`."""
    router = json_router(service, "Generation")

    @router.post("/open_session", responses={200: {"model": str}})
    async def open_session(body: OpenSessionBody, request: Request) -> Response:
        """Opens a session; the answer is its id."""
        service.count_requests(1, request.state.caller)
        return JSONResponse(sessions.open(request.state.caller.owner, body.session_id))

    @router.post("/close_session", response_class=Response)
    async def close_session(body: CloseSessionBody, request: Request) -> Response:
        """Forgets a session."""
        service.count_requests(1, request.state.caller)
        sessions.close(request.state.caller.owner, body.session_id)
        return Response()

    return router
