"""POST /v1/completions and /v1/chat/completions, and their other names on other servers."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from services.common.errors import InvalidRequest
from services.gateway.apis.openai.chat_format import BatchChatFormat, ChatFormat
from services.gateway.apis.openai.chat_schema import BatchChatRequest, ChatObject, ChatRequest
from services.gateway.apis.openai.completion_format import CompletionFormat
from services.gateway.apis.openai.completion_schema import CompletionObject, CompletionRequest
from services.gateway.apis.openai.conversion import (
    chat_message,
    completion_messages,
    read_chat_embeds,
    token_answer_message,
)
from services.gateway.apis.openai.fields import OpenAIFields
from services.gateway.apis.openai.format import OpenAIFormat
from services.gateway.apis.openai.measured_format import MeasuredFormat
from services.gateway.apis.openai.token_answer_format import PARAM_NAMES, TokenAnswerFormat
from services.gateway.apis.openai.token_answer_schema import TokenAnswerObject, TokenAnswerRequest
from services.gateway.apis.shared.answer import Answer, Format
from services.gateway.apis.shared.prompts import check_prompts
from services.gateway.apis.shared.routes import json_router, streamed
from services.gateway.core.request_service import RequestService
from services.gateway.http.field_names import client_field_names
from services.gateway.text.tools.tool import check_tools_size
from services.pb import gateway_pb2

MAX_OPTIONS_BYTES = 2**20  # of tools, form, template and the like, which all have limits of their own below it


def completion_routes(service: RequestService) -> APIRouter:
    """The routes for completions and chats of one gateway."""
    router = json_router(service, "Generation")

    @router.post("/v1/completions", responses=streamed(CompletionObject))
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continues one or several prompts."""
        request_id: str = request.state.request_id
        limits = service.limits
        if (body.prompt is None or body.prompt == []) and not body.embeds:
            raise InvalidRequest("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
        are_cut = body.truncate_prompt_tokens is not None
        check_prompts(body.prompts, limits, are_cut=are_cut, num_embeds=len(body.embeds))
        return Answer(
            service,
            await completion_messages(body, request_id, limits),
            _measured(CompletionFormat(service, body, request_id), body, service),
            is_stream=bool(body.stream),
        )

    @router.post("/chat/completions", include_in_schema=False)
    @router.post("/v1/chat/completions", responses=streamed(ChatObject))
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answers a chat."""
        request_id: str = request.state.request_id
        limits = service.limits
        message = chat_message(body, request_id, limits)
        await read_chat_embeds(body, message, limits)
        kept = body.without_messages()
        return Answer(
            service,
            [message],
            _measured(ChatFormat(service, kept, request_id), kept, service),
            is_stream=bool(body.stream),
        )

    @router.post(
        "/v1/chat/completions/batch",
        responses={200: {"model": ChatObject, "description": "An answer to each conversation"}},
    )
    async def create_batch_chat_completion(body: BatchChatRequest, request: Request) -> Response:
        """Answers several chats, as vLLM does."""
        request_id: str = request.state.request_id
        limits, chats, most = service.limits, body.chats, service.section.max_prompts
        if len(chats) > most:
            raise InvalidRequest(f"there are {len(chats)} chats, must be 1 to {most}", "messages")
        messages = [chat_message(chats[0], f"{request_id}-0", limits)]
        _check_options(messages[0])  # before there are as many copies as chats
        messages += [chat_message(each, f"{request_id}-{i}", limits) for i, each in enumerate(chats[1:], 1)]
        for each, message in zip(chats, messages, strict=True):
            await read_chat_embeds(each, message, limits)
        kept = chats[0].without_messages()
        return Answer(
            service,
            messages,
            _measured(BatchChatFormat(service, kept, request_id), kept, service),
            is_stream=False,
        )

    @router.post("/inference/v1/generate", responses=streamed(TokenAnswerObject))
    async def generate_tokens(body: TokenAnswerRequest, request: Request) -> Response:
        """vLLM's route for token ids: continues a prompt."""
        request_id: str = request.state.request_id
        limits, is_cut = service.limits, body.sampling_params.truncate_prompt_tokens is not None
        with client_field_names(PARAM_NAMES):
            check_prompts([body.token_ids], limits, are_cut=is_cut)
        return Answer(
            service,
            [token_answer_message(body, request_id, limits)],
            TokenAnswerFormat(service, body, request_id),
            is_stream=bool(body.stream),
        )

    return router


def _measured(form: OpenAIFormat, body: OpenAIFields, service: RequestService) -> Format:
    """`form` itself, unless times or progress are wanted beside what it gives."""
    has_timings, has_metrics = bool(body.timings_per_token), service.section.request_metrics
    has_progress = isinstance(body, ChatRequest) and body.has_progress
    if not (has_timings or has_metrics or has_progress):
        return form
    return MeasuredFormat(form, has_timings=has_timings, has_metrics=has_metrics)


def _check_options(message: gateway_pb2.GenerateRequest) -> None:
    """Raises `InvalidRequest` if what is beside the chat's messages is larger than any options that are allowed."""
    check_tools_size(message.chat.tools)
    num_bytes = message.ByteSize() - sum(each.ByteSize() for each in message.chat.messages)
    if num_bytes > MAX_OPTIONS_BYTES:
        raise InvalidRequest(f"the options of each chat have {num_bytes} bytes, at most {MAX_OPTIONS_BYTES} allowed")
