"""POST /generate_stream, and the answers of POST /generate and / to bodies of Text Generation Inference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from services.gateway import __version__
from services.gateway.apis.shared.answer import Answer
from services.gateway.apis.shared.prompts import check_prompts
from services.gateway.apis.shared.routes import json_router, streamed
from services.gateway.apis.tgi.conversion import tgi_messages
from services.gateway.apis.tgi.errors import ERROR_RESPONSES
from services.gateway.apis.tgi.format import TgiFormat
from services.gateway.apis.tgi.schema import StreamRequest, TextServerInfo, TgiEvent, TgiRequest
from services.gateway.core.request_service import RequestService
from services.gateway.http.field_names import client_field_names
from services.gateway.request.read_request import MAX_STOP_STRINGS


def text_generation_routes(service: RequestService) -> APIRouter:
    """The route that only Text Generation Inference has."""
    router = json_router(service, "Generation", ERROR_RESPONSES)

    @router.post("/generate_stream", responses=streamed(TgiEvent, description="A stream of tokens"))
    async def generate_stream(body: StreamRequest, request: Request) -> Response:
        """Text Generation Inference's own route: continues a text, with an event for each token."""
        return answer_text(service, body, request)

    return router


def is_text_body(body: Any) -> bool:
    """Whether a body at /generate is one of these, and not SGLang's."""
    if not isinstance(body, Mapping) or "inputs" not in body:
        return False
    return body.get("text") is None and body.get("input_ids") is None


def note_body(request: Request, body: Any) -> None:
    """Lets errors be of this dialect if the body is, see `is_text_generation`."""
    request.state.is_text_generation = request.scope["path"] == "/" or is_text_body(body)


def answer_text(service: RequestService, body: TgiRequest, request: Request, *, is_list: bool = False) -> Answer:
    """The answer, or a stream of its tokens. `is_list`: the answer is in a list, as at /."""
    request_id: str = request.state.request_id
    body.parameters.log_unknown_fields(request)
    limits = service.limits
    answer_format = TgiFormat(service, body, is_list=is_list)
    with client_field_names(answer_format.param_names):
        check_prompts([body.inputs], limits, are_cut=body.parameters.truncate is not None)
        messages = tgi_messages(body, request_id, limits)
    return Answer(service, messages, answer_format, is_stream=body.is_stream)


def text_server_info(service: RequestService) -> TextServerInfo:
    """The model and the limits of requests."""
    return {
        "model_id": service.names.root,
        "model_sha": None,
        "model_dtype": service.model.dtype,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": service.section.max_connections,
        "max_best_of": service.limits.max_n,
        "max_stop_sequences": MAX_STOP_STRINGS,
        "max_input_tokens": service.max_input_tokens,
        "max_total_tokens": service.model.max_model_len,
        "max_client_batch_size": 1,
        "router": "twostroke",
        "version": __version__,
    }
