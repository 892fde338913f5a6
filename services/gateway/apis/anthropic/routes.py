"""Anthropic's POST /v1/messages and /v1/messages/count_tokens, and vLLM's /v1/messages/render."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from services.common.errors import InvalidRequest
from services.gateway.apis.anthropic.answer_objects import MessageObject, TokensCount
from services.gateway.apis.anthropic.conversion import anthropic_chat, anthropic_message
from services.gateway.apis.anthropic.errors import ERROR_RESPONSES
from services.gateway.apis.anthropic.format import MessagesFormat, param_names
from services.gateway.apis.anthropic.schema import CountTokensRequest, MessagesRequest, RenderedMessages
from services.gateway.apis.shared.answer import Answer, PiecewiseAnswer
from services.gateway.apis.shared.rendered import RenderedPrompt
from services.gateway.apis.shared.routes import NAMED_STREAM_CONTENT, json_router, streamed
from services.gateway.apis.shared.to_message import sampling_options
from services.gateway.core.request_service import BYTES_PER_TOKEN_ID, RequestService
from services.gateway.http.field_names import client_field_names
from services.gateway.http.json_pieces import json_pieces
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

    @router.post("/v1/messages/render", responses={200: {"model": RenderedPrompt}})
    async def render_message(body: RenderedMessages, request: Request) -> Response:
        """vLLM's route: the token ids of the prompt, and the options under the names of vLLM."""
        service.names_for(request.state.caller).check(body.model)
        budget = None if body.thinking is None else body.thinking.budget_tokens
        if budget is not None and service.tokenizer.chat_formats.has_reasoning:
            reason = "token ids alone cannot limit the reasoning"
            raise InvalidRequest(f"thinking.budget_tokens cannot be used here: {reason}", "thinking.budget_tokens")
        message = gateway_pb2.TokenizeRequest(chat=anthropic_chat(body))
        if any(each.pictures for each in message.chat.messages):
            raise InvalidRequest("messages have pictures, which token ids alone do not show", "messages")
        params = {**sampling_options(body, service.local_model.sampling_defaults), "max_tokens": body.max_tokens}
        if body.stop_sequences:
            params["stop"] = body.stop_sequences
        if (form := (body.output_config and body.output_config.format) or body.output_format) is not None:
            params["structured_outputs"] = {"json": form.schema_}
        found: RenderedPrompt = {
            "request_id": f"msg_{request.state.request_id}",
            "model": body.model,
            "token_ids": [],
            "sampling_params": params,
            "stream": bool(body.stream),
            "stream_options": None,
            "cache_salt": None,
            "priority": 0,
        }
        names, held = param_names(body), request.state.held
        del body
        with client_field_names(names):
            [found["token_ids"]] = await service.tokenize([message], request.state.caller, held, BYTES_PER_TOKEN_ID)
        held.settle()
        return PiecewiseAnswer(json_pieces(found), service.heavy_work)

    @router.post("/v1/messages/count_tokens", responses={200: {"model": TokensCount}})
    async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
        """The number of tokens that the prompt would have."""
        service.names_for(request.state.caller).check(body.model)
        message, names = gateway_pb2.TokenizeRequest(chat=anthropic_chat(body)), param_names(body)
        del body
        with client_field_names(names):
            [token_ids] = await service.tokenize([message], request.state.caller)
        return JSONResponse({"input_tokens": len(token_ids)})

    return router
