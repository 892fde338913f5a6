"""OpenAI's POST /v1/responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from services.common.errors import InvalidRequest
from services.common.shorten import quote
from services.gateway.apis.responses.answer_objects import InputTokens, ResponseObject
from services.gateway.apis.responses.background import BackgroundResponses
from services.gateway.apis.responses.conversion import responses_message
from services.gateway.apis.responses.event_log import LoggedEvents
from services.gateway.apis.responses.format import PARAM_NAMES, ResponsesFormat
from services.gateway.apis.responses.response_store import ResponseStore, StoredAnswer
from services.gateway.apis.responses.schema import ResponsesRequest
from services.gateway.apis.responses.stored_record import FIELD, ResponseRecord, owner_of
from services.gateway.apis.responses.tool_conversion import OfferedTool, offered_tools
from services.gateway.apis.shared.answer import Answer
from services.gateway.apis.shared.routes import NAMED_STREAM_CONTENT, json_router, streamed
from services.gateway.core.request_service import RequestService
from services.gateway.http.field_names import client_field_names
from services.gateway.http.json_route import next_turn
from services.pb import gateway_pb2


def responses_routes(
    service: RequestService, store: ResponseStore | None, background: BackgroundResponses
) -> APIRouter:
    """The route of one gateway. `store`: keeps answers; None: each request has the whole conversation."""
    router = json_router(service, "Responses")

    @router.post("/responses", include_in_schema=False)  # llama.cpp's
    @router.post("/v1/responses", responses=streamed(ResponseObject, NAMED_STREAM_CONTENT))
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Answers a conversation."""
        request_id: str = request.state.request_id
        if body.has_logprobs and (body.tools or service.tokenizer.chat_formats.has_reasoning):
            raise InvalidRequest(
                "log-probabilities are for answers of plain text: not with tools, nor of a model that reasons",
                body.logprobs_field,
            )
        if body.background:
            _check_background(body, is_stored=store is not None)
        tools = offered_tools(body)
        message, record = await read_message(body, request, tools)
        await next_turn(request)
        answer_format = ResponsesFormat(service, body, request_id, tools, record)
        if body.background:
            message.traceparent = request.headers.get("traceparent", "")
            caller, held = request.state.caller, request.state.held
            started = await background.start(message, answer_format, caller, held, is_stream=bool(body.stream))
            if started.events is not None:
                return LoggedEvents(started.events)
            return StoredAnswer(answer_format.queued())
        return Answer(service, [message], answer_format, is_stream=bool(body.stream))

    @router.post("/v1/responses/input_tokens", responses={200: {"model": InputTokens}})
    async def count_input_tokens(body: ResponsesRequest, request: Request) -> Response:
        """The number of tokens that the prompt would have."""
        service.names_for(request.state.caller).check(body.model or "")
        message, _ = await read_message(body, request, offered_tools(body))
        del body
        with client_field_names(PARAM_NAMES):
            [token_ids] = await service.tokenize(
                [gateway_pb2.TokenizeRequest(chat=message.chat)], request.state.caller
            )
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(token_ids)})

    async def read_message(
        body: ResponsesRequest, request: Request, tools: dict[str, OfferedTool]
    ) -> tuple[gateway_pb2.GenerateRequest, ResponseRecord | None]:
        """The message of a request with its earlier items, and its record. None: this server stores no responses."""
        request_id: str = request.state.request_id

        def make(earlier: Sequence[Any]) -> gateway_pb2.GenerateRequest:
            defaults = service.local_model.sampling_defaults
            return responses_message(body, request_id, tools, earlier, defaults)

        if store is not None:
            owner, previous_id = owner_of(request.state.caller), body.previous_response_id
            if previous_id is not None and background.find(owner, previous_id) is not None:
                name = quote(previous_id)
                raise InvalidRequest(f"the response {name} is running: it can be continued when it has ended", FIELD)
            record = ResponseRecord(store, owner, request_id, body)
            limits = service.section.max_body_bytes, service.section.max_body_values
            return await record.after_earlier(make, *limits, service.heavy_work, request.state.held), record
        if body.previous_response_id is not None:
            raise InvalidRequest(
                "previous_response_id cannot be used here: this server stores no responses (gateway.store_responses)",
                FIELD,
            )
        return make(()), None

    return router


def _check_background(body: ResponsesRequest, *, is_stored: bool) -> None:
    """Raises `InvalidRequest` unless the client can ask for the response later."""
    if body.store is False:
        raise InvalidRequest("background can only be used when `store` is true", "background")
    if not is_stored:
        reason = "this server stores no responses (gateway.store_responses)"
        raise InvalidRequest(f"background cannot be used here: {reason}", "background")
    if body.has_logprobs:
        reason = "log-probabilities cannot be used with background: they are not stored"
        raise InvalidRequest(reason, body.logprobs_field)
