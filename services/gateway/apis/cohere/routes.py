"""Cohere's POST /v2/chat, which vLLM has at /cohere/v2/chat."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from services.gateway.apis.cohere.conversion import cohere_message
from services.gateway.apis.cohere.errors import CHAT_PATHS, ERROR_RESPONSES
from services.gateway.apis.cohere.format import CohereFormat
from services.gateway.apis.cohere.schema import CohereAnswer, CohereChatRequest
from services.gateway.apis.shared.answer import Answer
from services.gateway.apis.shared.routes import NAMED_STREAM_CONTENT, json_router, streamed
from services.gateway.core.request_service import RequestService


def cohere_chat_routes(service: RequestService) -> APIRouter:
    """The routes of one gateway."""
    router = json_router(service, "Messages", ERROR_RESPONSES)

    async def cohere_chat(body: CohereChatRequest, request: Request) -> Response:
        """Answers a chat as Cohere does."""
        request_id: str = request.state.request_id
        defaults = service.local_model.sampling_defaults
        reasons = service.tokenizer.chat_formats.has_reasoning
        message = cohere_message(body, request_id, defaults, reasons=reasons)
        return Answer(service, [message], CohereFormat(service, body, request_id), is_stream=bool(body.stream))

    for path in CHAT_PATHS:
        router.add_api_route(
            path,
            cohere_chat,
            methods=["POST"],
            responses=streamed(CohereAnswer, NAMED_STREAM_CONTENT),
            include_in_schema=path == CHAT_PATHS[0],
        )
    return router
