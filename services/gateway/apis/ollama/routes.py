"""Ollama's POST /api/chat and /api/generate, and what it tells of the model."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic_core import to_json

from services.gateway import __version__
from services.gateway.apis.ollama.conversion import chat_message, generate_chat, generate_message, name_without_tag
from services.gateway.apis.ollama.errors import ERROR_RESPONSES
from services.gateway.apis.ollama.format import OllamaFormat, answer_head
from services.gateway.apis.ollama.schema import (
    ListedModels,
    OllamaAnswer,
    OllamaChatRequest,
    OllamaFields,
    OllamaGenerateRequest,
    OllamaVersion,
    RunningModels,
    ShownModel,
    ShowRequest,
)
from services.gateway.apis.ollama.server_objects import listed_model, running_model, shown_model
from services.gateway.apis.shared.answer import LINE_CONTENT_TYPE, Answer
from services.gateway.apis.shared.routes import json_router, streamed
from services.gateway.core.request_service import RequestService
from services.gateway.http.field_names import client_field_names
from services.pb import gateway_pb2

LINES = {LINE_CONTENT_TYPE: {"schema": {"type": "string", "description": "Unless stream is false: a line for each"}}}


def ollama_routes(service: RequestService) -> APIRouter:
    """The routes of one gateway."""
    # Ollama reads any body as JSON, and its clients send other content types or none.
    router = json_router(service, "Generation", ERROR_RESPONSES, needs_json_type=False)
    start = datetime.fromtimestamp(int(time.time()), UTC)

    @router.post("/api/chat", responses=streamed(OllamaAnswer, LINES))
    async def ollama_chat(body: OllamaChatRequest, request: Request) -> Response:
        """Answers a chat as Ollama does."""
        names = service.names_for(request.state.caller)
        if not body.messages:
            names.check(name_without_tag(body.model, names))
            return _nothing(body, {"message": {"role": "assistant", "content": ""}})
        message = chat_message(body, request.state.request_id, names)
        return answer(body, message, OllamaFormat(service, body, has_context=False))

    @router.post("/api/generate", responses=streamed(OllamaAnswer, LINES))
    async def ollama_generate(body: OllamaGenerateRequest, request: Request) -> Response:
        """Answers a text as Ollama does: as a chat, if the model has a template for it."""
        names, tokenizer = service.names_for(request.state.caller), service.tokenizer
        if not body.prompt and not body.images:
            names.check(name_without_tag(body.model, names))
            return _nothing(body, {"response": ""})
        has_template = tokenizer.hf_tokenizer.chat_template is not None
        message = generate_message(body, request.state.request_id, names, has_template=has_template)
        answer_format = OllamaFormat(service, body, has_context=not body.raw)
        if body.context:
            given = gateway_pb2.TokenizeRequest(text=message.prompt)
            if message.HasField("chat"):
                given = gateway_pb2.TokenizeRequest(chat=generate_chat(body))
            with client_field_names(answer_format.param_names):
                [token_ids] = await service.tokenize([given], request.state.caller)
            message.prompt_token_ids.ids.extend([*body.context, *token_ids])
        return answer(body, message, answer_format)

    def answer(body: OllamaFields, message: gateway_pb2.GenerateRequest, answer_format: OllamaFormat) -> Answer:
        return Answer(service, [message], answer_format, is_stream=body.is_stream)

    def listed(request: Request) -> list[str]:
        names = service.names_for(request.state.caller)
        return [*names.names, *names.adapters]

    @router.get("/api/tags", responses={200: {"model": ListedModels}})
    async def list_tags(request: Request) -> ListedModels:
        """The served model under its names, and the adapters that the caller may use."""
        return {"models": [listed_model(service, name, start) for name in listed(request)]}

    @router.get("/api/ps", responses={200: {"model": RunningModels}})
    async def list_running(request: Request) -> RunningModels:
        """The same: all are in memory."""
        return {"models": [running_model(service, name, start) for name in listed(request)]}

    @router.post("/api/show", responses={200: {"model": ShownModel}})
    async def show(body: ShowRequest, request: Request) -> Response:
        """What kind of model it is."""
        names = service.names_for(request.state.caller)
        name = name_without_tag(body.model or body.name or "", names)
        names.check(name)
        return JSONResponse(shown_model(service, name or names.first, start))

    @router.get("/api/version", responses={200: {"model": OllamaVersion}})
    async def version() -> OllamaVersion:
        """The server's version."""
        return {"version": __version__}

    return router


def _nothing(body: OllamaFields, piece: dict[str, Any]) -> Response:
    """The answer without a prompt, by which Ollama's clients load a model, or with keep_alive 0 unload it."""
    reason = "unload" if body.keep_alive in (0, "0", "0s") else "load"
    line = to_json({**answer_head(body.model), **piece, "done": True, "done_reason": reason})
    return Response(line + b"\n", media_type=LINE_CONTENT_TYPE if body.is_stream else "application/json")
