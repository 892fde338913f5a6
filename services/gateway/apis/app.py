"""The HTTP application: all routers, error handlers, and the OpenAPI document."""

from __future__ import annotations

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from services.common.config import GatewaySection
from services.gateway import __version__
from services.gateway.apis.anthropic.errors import ANTHROPIC
from services.gateway.apis.anthropic.routes import messages_routes
from services.gateway.apis.llama_cpp.errors import LLAMA_CPP
from services.gateway.apis.llama_cpp.routes import llama_cpp_routes
from services.gateway.apis.models import model_routes
from services.gateway.apis.openai.routes import completion_routes
from services.gateway.apis.openai.token_routes import token_routes
from services.gateway.apis.responses.response_store import ResponseStore
from services.gateway.apis.responses.routes import responses_routes
from services.gateway.apis.responses.stored_routes import stored_response_routes
from services.gateway.apis.server.adapter_routes import adapter_routes
from services.gateway.apis.server.metrics_routes import metrics_routes
from services.gateway.apis.server.page_routes import page_routes
from services.gateway.apis.server.routes import server_routes
from services.gateway.apis.sglang.routes import generate_routes
from services.gateway.apis.triton.errors import TRITON
from services.gateway.apis.triton.inference import Triton
from services.gateway.apis.triton.routes import triton_routes
from services.gateway.core.request_service import RequestService
from services.gateway.http.authorize import Authorize
from services.gateway.http.document import add_document
from services.gateway.http.errors import add_error_handlers
from services.gateway.http.head_requests import HeadRequests
from services.gateway.link.worker_load import WorkerLoad

DIALECTS = (TRITON, ANTHROPIC, LLAMA_CPP)  # those whose errors are not OpenAI's


def build_app(
    service: RequestService,
    section: GatewaySection,
    registry: CollectorRegistry,
    worker_load: WorkerLoad,
    triton: Triton,
) -> FastAPI:
    """The application of one gateway, without FastAPI's documentation pages: they load scripts from other sites."""
    app = FastAPI(
        title="Twostroke", version=__version__, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.add_middleware(Authorize, access=service.access, memory=service.memory)
    app.add_middleware(HeadRequests)
    add_error_handlers(app, service.metrics)
    app.include_router(completion_routes(service, section))
    app.include_router(generate_routes(service, section))
    app.include_router(llama_cpp_routes(service, section))
    app.include_router(messages_routes(service, section))
    store = _response_store(section)
    app.include_router(responses_routes(service, section, store))
    app.include_router(stored_response_routes(service, section, store))
    app.include_router(token_routes(service, section))
    app.include_router(model_routes(service))
    app.include_router(server_routes(service))
    app.include_router(adapter_routes(service, section))
    app.include_router(triton_routes(triton, section))
    app.include_router(metrics_routes(registry))
    app.include_router(page_routes(service, worker_load))
    add_document(app, DIALECTS)
    return app


def _response_store(section: GatewaySection) -> ResponseStore | None:
    if not section.store_responses:
        return None
    return ResponseStore(
        section.max_stored_responses, section.max_stored_response_bytes, section.max_all_stored_response_bytes
    )
