"""POST /generate, GET /info, and POST / of models that generate: paths that several dialects have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Discriminator, Tag

from services.gateway.apis.sglang.routes import answer_generate
from services.gateway.apis.sglang.schema import GenerateBody, GenerateObject
from services.gateway.apis.sglang.sessions import Sessions
from services.gateway.apis.shared.routes import json_router, streamed
from services.gateway.apis.tgi.errors import ERROR_RESPONSES as TGI_ERRORS
from services.gateway.apis.tgi.routes import answer_text, is_text_body, note_body, text_server_info
from services.gateway.apis.tgi.schema import TextServerInfo, TgiRequest
from services.gateway.apis.vectors.tei_routes import ModelInfo, model_info
from services.gateway.http.errors import ERROR_RESPONSES, either_responses
from services.gateway.vectors.vectors import Vectors

AnyGenerateBody = Annotated[
    Annotated[GenerateBody, Tag("<sglang>")] | Annotated[TgiRequest, Tag("<texts>")],
    Discriminator(lambda body: "<texts>" if is_text_body(body) else "<sglang>"),
]


def same_path_routes(vectors: Vectors, sessions: Sessions) -> APIRouter:
    """The routes of one gateway. The body tells which one is meant, or what the model is for."""
    service = vectors.service
    router = json_router(service, "Generation", note_body=note_body)

    @router.post(
        "/generate",
        responses={
            **either_responses(ERROR_RESPONSES, TGI_ERRORS),
            **streamed(GenerateObject | list[GenerateObject], description="The answer, or a list of answers"),
        },
    )
    async def generate(body: AnyGenerateBody, request: Request) -> Response:
        """SGLang's own route: continues one or several prompts. With `inputs` it is Text Generation Inference's."""
        if isinstance(body, TgiRequest):
            return answer_text(service, body, request)
        return await answer_generate(service, sessions, body, request)

    @router.get("/info", responses={200: {"model": ModelInfo | TextServerInfo}})
    async def info() -> Mapping[str, Any]:
        """The model, what it is for, and the limits of requests."""
        return model_info(vectors) if vectors.makes_any else text_server_info(service)

    if not vectors.makes_any:

        @router.post("/", include_in_schema=False)
        async def continue_text(body: TgiRequest, request: Request) -> Response:
            return answer_text(service, body, request, is_list=True)

    return router
