"""Anthropic's POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from services.gateway.apis.anthropic.answer_objects import MessageObject, TokensCount
from services.gateway.apis.anthropic.conversion import anthropic_chat, anthropic_message
from services.gateway.apis.anthropic.errors import ERROR_RESPONSES
from services.gateway.apis.anthropic.format import MessagesFormat, param_names
from services.gateway.apis.anthropic.schema import CountTokensRequest, MessagesRequest
from services.gateway.apis.shared.answer import Answer
from services.gateway.apis.shared.routes import NAMED_STREAM_CONTENT, json_router, streamed
from services.gateway.core.request_service import RequestService
from services.gateway.http.field_names import client_field_names
from services.gateway.http.json_route import next_turn
from services.pb import gateway_pb2


def messages_routes(service: RequestService) -> APIRouter:
    """The routes of one gateway."""
    router = json_router(service, "Messages", ERROR_RESPONSES)

    @router.post("/v1/messages", responses=streamed(MessageObject, NAMED_STREAM_CONTENT))
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        """Answers a conversation."""
        request_id: str = request.state.request_id
        defaults = service.local_model.sampling_defaults
        reasons = service.tokenizer.chat_formats.has_reasoning
        message = anthropic_message(body, request_id, defaults, reasons=reasons)
        await next_turn(request)
        return Answer(service, [message], MessagesFormat(service, body, request_id), is_stream=bool(body.stream))

    @router.post("/v1/messages/count_tokens", responses={200: {"model": TokensCount}})
    async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
        """The number of tokens that the prompt would have."""
        service.names_for(request.state.caller).check(body.model)
        message = gateway_pb2.TokenizeRequest(chat=anthropic_chat(body))
        with client_field_names(param_names(body)):
            [token_ids] = await service.tokenize([message], request.state.caller)
        return JSONResponse({"input_tokens": len(token_ids)})

    return router
