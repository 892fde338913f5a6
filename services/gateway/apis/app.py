"""The HTTP application: all routers, error handlers, and the OpenAPI document."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.responses import Response
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp

from services.common.config import GatewaySection
from services.gateway import __version__
from services.gateway.access.weight_updates import WeightUpdates
from services.gateway.apis.anthropic.errors import ANTHROPIC
from services.gateway.apis.anthropic.routes import messages_routes
from services.gateway.apis.audio.routes import Speech, audio_routes
from services.gateway.apis.cohere.errors import COHERE
from services.gateway.apis.cohere.routes import cohere_chat_routes
from services.gateway.apis.cohere.vector_routes import cohere_vector_routes
from services.gateway.apis.invocations import invocation_routes
from services.gateway.apis.llama_cpp.errors import LLAMA_CPP, LLAMA_CPP_CHATS
from services.gateway.apis.llama_cpp.routes import llama_cpp_routes
from services.gateway.apis.llama_cpp.vector_routes import llama_cpp_vector_routes
from services.gateway.apis.models import model_routes
from services.gateway.apis.ollama.errors import OLLAMA
from services.gateway.apis.ollama.routes import ollama_routes
from services.gateway.apis.ollama.vector_routes import ollama_vector_routes
from services.gateway.apis.openai.derender_routes import derender_routes
from services.gateway.apis.openai.render_routes import render_routes
from services.gateway.apis.openai.routes import completion_routes
from services.gateway.apis.openai.token_routes import token_routes
from services.gateway.apis.responses.background import BackgroundResponses
from services.gateway.apis.responses.response_store import ResponseStore
from services.gateway.apis.responses.routes import responses_routes
from services.gateway.apis.responses.stored_routes import stored_response_routes
from services.gateway.apis.same_paths import same_path_routes
from services.gateway.apis.server.adapter_routes import adapter_routes
from services.gateway.apis.server.page_routes import page_routes
from services.gateway.apis.server.routes import server_routes
from services.gateway.apis.server.weight_routes import weight_routes
from services.gateway.apis.sglang.routes import generate_routes
from services.gateway.apis.sglang.sessions import Sessions, session_routes
from services.gateway.apis.sglang.vertex_routes import vertex_routes
from services.gateway.apis.tgi.errors import TGI
from services.gateway.apis.tgi.routes import text_generation_routes
from services.gateway.apis.triton.errors import TRITON
from services.gateway.apis.triton.inference import Triton
from services.gateway.apis.triton.routes import triton_routes
from services.gateway.apis.vectors.routes import vector_routes
from services.gateway.apis.vectors.score_routes import score_routes
from services.gateway.apis.vectors.tei_routes import tei_routes
from services.gateway.core.request_service import RequestService
from services.gateway.http.authorize import Authorize
from services.gateway.http.errors import Dialect, add_error_handlers, error_schemas
from services.gateway.http.json_route import DirectRoutes
from services.gateway.http.load_report import LoadReport
from services.gateway.link.gateway_peers import GatewayPeers
from services.gateway.link.worker_load import WorkerLoad
from services.gateway.metrics.all_processes import AllProcesses
from services.gateway.resume.http_calls import HttpResumption
from services.gateway.resume.resumption import Resumption
from services.gateway.vectors.vectors import Vectors

# Those whose errors are not OpenAI's; the first that is meant.
DIALECTS = (COHERE, TRITON, ANTHROPIC, LLAMA_CPP, LLAMA_CPP_CHATS, TGI, OLLAMA)


def build_app(
    service: RequestService,
    measured: AllProcesses,
    worker_load: WorkerLoad,
    triton: Triton,
    weight_updates: WeightUpdates,
    vectors: Vectors,
    peers: GatewayPeers,
    background: BackgroundResponses,
    resumption: Resumption | None = None,
    speech: Speech | None = None,
) -> FastAPI:
    """The application of one gateway, without FastAPI's documentation pages: they load scripts from other sites.

    `resumption`: None if requests cannot be resumed. `speech`: None if the model reads no sound.
    """
    app = _Application(
        title="Twostroke",
        version=__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # `RequestService` has spans of its own
    )
    if resumption is not None:
        app.add_middleware(HttpResumption, resumption=resumption)
    app.add_middleware(LoadReport, worker_load=worker_load)
    app.add_middleware(Authorize, access=service.access, memory=service.memory)
    add_error_handlers(app, service.metrics)
    store, sessions = _response_store(service.section), Sessions(service.section.max_session_bytes)
    routers = [
        completion_routes(service),
        generate_routes(service, peers, worker_load),
        text_generation_routes(service),
        same_path_routes(vectors, sessions),
        session_routes(service, sessions),
        vertex_routes(service, sessions),
        llama_cpp_routes(service),
        ollama_routes(service),
        cohere_chat_routes(service),
        messages_routes(service),
        responses_routes(service, store, background),
        stored_response_routes(service, store, background),
        vector_routes(vectors),
        llama_cpp_vector_routes(vectors),
        score_routes(vectors),
        tei_routes(vectors),
        cohere_vector_routes(vectors),
        ollama_vector_routes(vectors),
        token_routes(service, vectors),
        render_routes(service),
        derender_routes(service),
        audio_routes(service, speech),
        model_routes(service),
        server_routes(service, measured),
        adapter_routes(service),
        weight_routes(service, weight_updates),
        triton_routes(triton),
        page_routes(service, worker_load),
    ]
    routers.append(invocation_routes(vectors, routers))
    routes = [route for router in routers for route in router.routes]
    app.router.routes += routes  # `include_router` would prepare each of them once more
    app.routed = DirectRoutes(AsyncExitStackMiddleware(app.router), routes, service.heavy_work)
    _add_document(app, DIALECTS)
    return app


class _Application(FastAPI):
    """FastAPI without its layers around every request for telemetry and the sizes of bodies, which are off, and with
    `DirectRoutes` in front of what only its own routes need.
    """

    routed: ASGIApp  # what the error handlers are around
    __call__ = Starlette.__call__

    def build_middleware_stack(self) -> ASGIApp:
        handlers = dict(self.exception_handlers)
        unexpected = handlers.pop(Exception)
        stack: ASGIApp = ExceptionMiddleware(self.routed, handlers)
        for each in reversed(self.user_middleware):
            stack = each.cls(stack, *each.args, **each.kwargs)
        return ServerErrorMiddleware(stack, unexpected)


def _response_store(section: GatewaySection) -> ResponseStore | None:
    if not section.store_responses:
        return None
    return ResponseStore(
        section.max_stored_responses, section.max_stored_response_bytes, section.max_all_stored_response_bytes
    )


def _add_document(app: FastAPI, dialects: Sequence[Dialect]) -> None:
    """Adds /openapi.json. Making it takes a quarter of a second, in a thread, for the first reader."""
    lock = asyncio.Lock()
    body: bytes | None = None

    async def openapi_document(request: Request) -> Response:
        nonlocal body
        async with lock:
            if body is None:
                body = await asyncio.to_thread(_make_document, app, dialects)
        return Response(body, media_type="application/json")

    app.add_route("/openapi.json", openapi_document, include_in_schema=False)


def _make_document(app: FastAPI, dialects: Sequence[Dialect]) -> bytes:
    document = app.openapi()
    document["components"]["schemas"].update(error_schemas(dialects))
    for path in document["paths"].values():
        for operation in path.values():
            # FastAPI documents a 422 for invalid bodies: this server answers with a 400, or in its own words.
            if operation["responses"].get("422", {}).get("description") == "Validation Error":
                del operation["responses"]["422"]
    return to_json(document)
