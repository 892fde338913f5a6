"""POST /generate, as SGLang has it."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from services.common.config import GatewaySection
from services.gateway.apis.openai.routes import STREAM_CONTENT, check_prompts, traced
from services.gateway.apis.sglang.format import GenerateFormat
from services.gateway.apis.sglang.schema import GenerateBody, GenerateObject
from services.gateway.apis.shared.answer import Answer
from services.gateway.apis.shared.to_message import completion_messages
from services.gateway.core.request_service import RequestService
from services.gateway.http.errors import ERROR_RESPONSES
from services.gateway.http.field_names import client_field_names
from services.gateway.http.json_route import json_route, next_turn


def generate_routes(service: RequestService, section: GatewaySection) -> APIRouter:
    """The route of one gateway."""
    route_class = json_route(section.max_body_values, service.heavy_work)
    router = APIRouter(route_class=route_class, tags=["Generation"], responses=ERROR_RESPONSES)

    @router.post(
        "/generate",
        response_class=Response,
        responses={
            200: {
                "model": GenerateObject | list[GenerateObject],
                "content": STREAM_CONTENT,
                "description": "The answer, or a list of answers",
            }
        },
    )
    async def generate(body: GenerateBody, request: Request) -> Response:
        """SGLang's own route: continues one or several prompts."""
        await next_turn(request)
        request_id = body.rid or request.state.request_id
        body.log_unknown_fields(request.state.request_id)
        body.sampling_params.log_unknown_fields(request.state.request_id)
        completion, limits = body.completion, service.limits
        answer_format = GenerateFormat(service, body, request_id)
        with client_field_names(answer_format.param_names):
            check_prompts(completion, section.max_prompts, limits.max_model_len)
        messages = completion_messages(completion, request_id, limits)
        for prompt_index, message in enumerate(messages):
            message.sampling.logprob_token_ids.extend(body.named_tokens(prompt_index))
            message.return_hidden_states = bool(body.return_hidden_states)
        return Answer(
            service,
            traced(messages, request),
            answer_format,
            is_stream=bool(body.stream),
            first_token_timeout_s=section.first_token_timeout_s,
            repeats_logprobs=bool(body.return_logprob),
        )

    return router
