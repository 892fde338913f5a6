"""Routes whose bodies are those of other routes, chosen by their fields.

They are SageMaker's POST /invocations, as in vLLM, and POST / of Text Embeddings Inference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import Discriminator, Tag

from services.gateway.apis.openai.chat_schema import ChatObject, ChatRequest
from services.gateway.apis.openai.completion_schema import CompletionObject, CompletionRequest
from services.gateway.apis.shared.routes import json_router, streamed
from services.gateway.apis.vectors.schema import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from services.gateway.apis.vectors.tei_routes import EmbedRequest, PredictRequest, SimilarityRequest
from services.gateway.vectors.vectors import Vectors

PATHS = {  # of the routes for these bodies
    ChatRequest: "/v1/chat/completions",
    CompletionRequest: "/v1/completions",
    EmbeddingRequest: "/v1/embeddings",
    ClassifyRequest: "/classify",
    ScoreRequest: "/score",
    RerankRequest: "/rerank",
}
ROOT_PATHS = {
    EmbedRequest: "/embed",
    PredictRequest: "/predict",
    SimilarityRequest: "/similarity",
    RerankRequest: "/rerank",
}


def invocation_routes(vectors: Vectors, routers: Sequence[APIRouter]) -> APIRouter:
    """The routes of one gateway. `routers`: with all others."""
    router = json_router(vectors.service, "Generation")
    routes = [route for each in routers for route in each.routes]
    endpoints = {route.path: route.endpoint for route in routes if isinstance(route, APIRoute)}

    def kind_of(body: Any) -> str:
        fields = {name for name, value in body.items() if value is not None} if isinstance(body, Mapping) else set()
        if "query" in fields:
            return "<rerank>"
        if fields & {"text_1", "queries", "data_1"}:
            return "<score>"
        is_inputs = "input" in fields or ("messages" in fields and not vectors.service.generates)
        if is_inputs:
            return "<classify>" if vectors.is_classifier else "<embedding>"
        return "<chat>" if "messages" in fields else "<completion>"

    any_request = Annotated[
        Annotated[ChatRequest, Tag("<chat>")]
        | Annotated[CompletionRequest, Tag("<completion>")]
        | Annotated[EmbeddingRequest, Tag("<embedding>")]
        | Annotated[ClassifyRequest, Tag("<classify>")]
        | Annotated[ScoreRequest, Tag("<score>")]
        | Annotated[RerankRequest, Tag("<rerank>")],
        Discriminator(kind_of),
    ]

    async def invoke(body: any_request, request: Request) -> Response:  # type: ignore[valid-type]
        """A chat, a completion, inputs for vectors, pairs or documents for scores, by the fields of the body."""
        return await endpoints[PATHS[type(body)]](body, request)

    invoke.__annotations__["body"] = any_request  # it is made here, where FastAPI does not find its name
    router.add_api_route(
        "/invocations",
        invoke,
        methods=["POST"],
        responses=streamed(ChatObject | CompletionObject),
    )
    if vectors.makes_any:
        _add_root(router, vectors, endpoints)
    return router


def _add_root(router: APIRouter, vectors: Vectors, endpoints: Mapping[str, Callable[..., Any]]) -> None:
    """POST / of a model that makes vectors, labels, cosines or an order."""

    def kind_of(body: Any) -> str:
        if isinstance(body, Mapping) and "query" in body:
            return "<rerank>"
        if isinstance(body, Mapping) and isinstance(body.get("inputs"), Mapping):
            return "<similarity>"
        return "<predict>" if vectors.is_classifier else "<embed>"

    any_request = Annotated[
        Annotated[EmbedRequest, Tag("<embed>")]
        | Annotated[PredictRequest, Tag("<predict>")]
        | Annotated[SimilarityRequest, Tag("<similarity>")]
        | Annotated[RerankRequest, Tag("<rerank>")],
        Discriminator(kind_of),
    ]

    async def handle_any(body: any_request, request: Request) -> Response:  # type: ignore[valid-type]
        return await endpoints[ROOT_PATHS[type(body)]](body, request)

    handle_any.__annotations__["body"] = any_request  # it is made here, where FastAPI does not find its name
    router.add_api_route("/", handle_any, methods=["POST"], include_in_schema=False)
