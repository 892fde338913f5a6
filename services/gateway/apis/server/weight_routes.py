"""What admins of weights may do while requests run: /admin/weights for others, /flush_cache to forget prefixes."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import Field
from starlette.exceptions import HTTPException
from typing_extensions import TypedDict

from services.common.errors import PermissionDenied
from services.gateway.access.weight_updates import WeightUpdates
from services.gateway.apis.shared.request_model import RequestModel
from services.gateway.apis.shared.routes import json_router
from services.gateway.core.request_service import RequestService

MAX_WAIT_S = 3600.0


class WeightsBody(RequestModel):
    """The weights to serve."""

    model: str = Field("", description="Directory of a model of the same shape, below gateway.weights_directory")
    mode: Literal["keep", "wait", "abort"] = Field(
        "wait", description="What becomes of open requests: they go on, the running ones end first, or all fail"
    )
    keep_caches: bool | None = Field(None, description="Keep keys and values of the earlier weights; default: false")
    wait_timeout_s: float = Field(60.0, ge=0, le=MAX_WAIT_S, description="With wait: longest time for running requests")


class WeightsAnswer(TypedDict):
    """The dense worker that serves now. `pause_ms`: for how long there was none."""

    has_other_weights: bool
    backend: str
    pause_ms: float


def weight_routes(service: RequestService, updates: WeightUpdates) -> APIRouter:
    """The routes that change the weights of the dense worker, and forget what is cached of prompts."""
    router = json_router(service, "Server")

    @router.post("/admin/weights", responses={200: {"model": WeightsAnswer}})
    async def change_weights(body: WeightsBody, request: Request) -> Response:
        """Serves other weights, by a new dense worker. Answers when it serves; if it cannot, nothing has changed."""
        if not updates.is_enabled:
            raise HTTPException(404, "weights cannot be changed here: gateway.weights_directory is not set")
        service.count_requests(1, request.state.caller)
        reply = await updates.update(
            request.state.caller,
            body.model,
            body.mode,
            keeps_caches=bool(body.keep_caches),
            wait_timeout_s=body.wait_timeout_s,
        )
        return JSONResponse(
            {"has_other_weights": reply.has_other_weights, "backend": reply.backend, "pause_ms": reply.pause_ms}
        )

    @router.post("/flush_cache", response_class=PlainTextResponse)  # SGLang's
    @router.post("/reset_prefix_cache", response_class=PlainTextResponse)  # vLLM's
    async def flush_cache(request: Request) -> PlainTextResponse:
        """Requests that come later find no blocks of earlier ones; those that run go on.

        Answers when all dense workers have confirmed it, mostly within the step that runs.
        """
        caller = request.state.caller
        service.count_requests(1, caller)
        if caller.key is not None and caller.name not in service.section.weights_admins:
            raise PermissionDenied(f"the API key {caller.name!r} may not flush the cache: see gateway.weights_admins")
        await service.forget_prefixes()
        return PlainTextResponse("Cache flushed.\n")

    return router
