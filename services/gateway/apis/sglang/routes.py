"""POST /generate, as SGLang has it."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from services.common.config import GatewaySection
from services.gateway.apis.sglang.conversion import generate_messages
from services.gateway.apis.sglang.format import GenerateFormat
from services.gateway.apis.sglang.schema import GenerateBody, GenerateObject
from services.gateway.apis.shared.answer import Answer
from services.gateway.apis.shared.prompts import check_prompts
from services.gateway.apis.shared.streams import STREAM_CONTENT, traced
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
        limits = service.limits
        answer_format = GenerateFormat(service, body, request_id)
        with client_field_names(answer_format.param_names):
            check_prompts(
                body.prompts,
                section.max_prompts,
                limits.max_prompt_len,
                are_cut=body.sampling_params.truncate_prompt_tokens is not None,
            )
        messages = generate_messages(body, request_id, limits)
        return Answer(
            service,
            traced(messages, request),
            answer_format,
            is_stream=bool(body.stream),
            first_token_timeout_s=section.first_token_timeout_s,
            repeats_logprobs=bool(body.return_logprob),
        )

    return router
