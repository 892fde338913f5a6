"""/v1/completions/render and /v1/chat/completions/render, as in vLLM: what /inference/v1/generate is to be asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from fastapi.responses import Response

from services.common.errors import InvalidRequest
from services.gateway.apis.openai.chat_format import PARAM_NAMES
from services.gateway.apis.openai.chat_schema import ChatRequest
from services.gateway.apis.openai.completion_schema import CompletionRequest
from services.gateway.apis.openai.conversion import (
    DEFAULT_COMPLETION_TOKENS,
    chat_of,
    choice_text,
    defaults_for,
    refuse_embeds,
)
from services.gateway.apis.openai.fields import OpenAIFields
from services.gateway.apis.openai.token_answer_schema import TokenSampling
from services.gateway.apis.shared.answer import PiecewiseAnswer
from services.gateway.apis.shared.feature_fields import NO_FEATURES
from services.gateway.apis.shared.prompts import check_prompts
from services.gateway.apis.shared.rendered import RenderedPrompt
from services.gateway.apis.shared.routes import json_router
from services.gateway.core.request_service import BYTES_PER_TOKEN_ID, RequestService
from services.gateway.http.field_names import client_field_names
from services.gateway.http.json_pieces import WrittenJson, json_pieces
from services.pb import gateway_pb2

# Fields that stand in the body, or have had their effect on the prompt.
NOT_OF_SAMPLING = {
    "add_special_tokens",
    "cache_salt",
    "logprobs",
    "model",
    "n_predict",
    "priority",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "stream",
    "stream_options",
    "timings_per_token",
}
OF_SAMPLING = TokenSampling.model_fields.keys() - NOT_OF_SAMPLING


class RenderedCompletion(CompletionRequest):
    """A completion of texts or token ids."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **CompletionRequest.unsupported,
        **NO_FEATURES,
        "decoder_prompt": (),
        "extra_key": (),
        "return_token_offsets": (False,),
        "echo": (False,),
        "prompt_embeds": ([],),
        "suffix": ("",),
    }


class RenderedChat(ChatRequest):
    """A chat of texts. Token ids alone cannot ask for what is made of the answer as it grows."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **ChatRequest.unsupported,
        **NO_FEATURES,
        "echo": (False,),
        "extra_key": (),
        "return_token_offsets": (False,),
        "max_reasoning_tokens": (),
        "parallel_tool_calls": (True,),
        "thinking_token_budget": (-1,),
        "tool_choice": ("auto", "none"),
    }


def render_routes(service: RequestService) -> APIRouter:
    """The routes of one gateway."""
    router = json_router(service, "Tokens")

    @router.post("/v1/completions/render", responses={200: {"model": list[RenderedPrompt]}})
    async def render_completion(body: RenderedCompletion, request: Request) -> Response:
        """The token ids of each prompt, and the options under the names of vLLM."""
        service.names_for(request.state.caller).check(body.model or "")
        check_prompts(body.prompts, service.limits, are_cut=body.truncate_prompt_tokens is not None)
        lists: list[Sequence[int]] = []
        for each in body.prompts:
            if isinstance(each, str):
                message = gateway_pb2.TokenizeRequest(text=each, add_special_tokens=body.add_special_tokens)
                lists += await tokenized(message, request)
            else:
                lists.append(each)
        request.state.held.settle()
        params = sampling_params(body)
        if body.n_predict is None:
            params.setdefault("max_tokens", DEFAULT_COMPLETION_TOKENS)
        if body.logprobs is not None:
            params["logprobs"] = body.logprobs
        name = f"cmpl-{request.state.request_id}"
        names = [name] if len(lists) == 1 else [f"{name}-{i}" for i in range(len(lists))]
        written = WrittenJson(params)
        found = [rendered(body, each, token_ids, written) for each, token_ids in zip(names, lists, strict=True)]
        return PiecewiseAnswer(json_pieces(found), service.heavy_work)

    @router.post("/v1/chat/completions/render", responses={200: {"model": RenderedPrompt}})
    async def render_chat(body: RenderedChat, request: Request) -> Response:
        """The token ids of a chat, and the options under the names of vLLM."""
        service.names_for(request.state.caller).check(body.model or "")
        refuse_embeds(body, "only texts are shown as tokens")
        if any(each.images for each in body.messages if isinstance(each.content, list)):
            raise InvalidRequest("messages have pictures, which token ids alone do not show", "messages")
        chat = chat_of(body)
        chat.tool_choice = choice_text(body.tool_choice) if body.tools else ""
        chat.reasoning_effort = body.reasoning_effort or ""
        message = gateway_pb2.TokenizeRequest(chat=chat, add_special_tokens=body.add_special_tokens)
        params = sampling_params(body)
        if body.max_completion_tokens is not None:
            params["max_tokens"] = body.max_completion_tokens
        if body.logprobs:
            params["logprobs"] = body.top_logprobs or 0
        found = rendered(body, f"chatcmpl-{request.state.request_id}", (), params)
        del body
        with client_field_names(PARAM_NAMES):
            [found["token_ids"]] = await tokenized(message, request)
        request.state.held.settle()
        return PiecewiseAnswer(json_pieces(found), service.heavy_work)

    async def tokenized(message: gateway_pb2.TokenizeRequest, request: Request) -> list[list[int]]:
        return await service.tokenize([message], request.state.caller, request.state.held, BYTES_PER_TOKEN_ID)

    def sampling_params(body: OpenAIFields) -> dict[str, Any]:
        """The options that are given, and the model's."""
        params: dict[str, Any] = dict(defaults_for(body, service.local_model))
        params |= body.model_dump(include=OF_SAMPLING, exclude_none=True, by_alias=True)
        if body.max_tokens is None and body.n_predict is not None and body.n_predict >= 0:
            params["max_tokens"] = body.n_predict
        return params

    def rendered(
        body: OpenAIFields, request_id: str, token_ids: Sequence[int], params: dict[str, Any] | WrittenJson
    ) -> RenderedPrompt:
        options = body.stream_options
        return {
            "request_id": request_id,
            "model": body.model or service.names.first,
            "token_ids": list(token_ids),
            "sampling_params": params,
            "stream": bool(body.stream),
            "stream_options": None if options is None else options.model_dump(exclude_none=True),
            "cache_salt": body.cache_salt,
            "priority": body.priority or 0,
        }

    return router
