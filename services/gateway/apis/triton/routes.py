"""Triton's routes below /v2: KServe's inference protocol, version 2, and the `generate` extension."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from services.common.errors import InvalidRequest
from services.gateway.apis.triton.errors import ERROR_RESPONSES
from services.gateway.apis.triton.http_answer import GenerateStream, InferAnswer, generate_object
from services.gateway.apis.triton.http_body import (
    HEADER_LENGTH,
    decompressed,
    describe_infer_response,
    read_infer_request,
    split_body,
)
from services.gateway.apis.triton.inference import InferRequest, Triton, server_metadata
from services.gateway.apis.triton.models import ModelSpec, find_model
from services.gateway.apis.triton.rows import flat_fields, row_of_json
from services.gateway.http.json_route import next_turn, note_size, parse_json
from services.gateway.resources.memory_budget import BYTES_PER_BODY_BYTE

MODEL = "/v2/models/{model_name}"
VERSIONED = MODEL + "/versions/{model_version}"
JSON_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}}
EVENTS = {"text/event-stream": {"schema": {"type": "string"}}}


async def _find(model_name: str, model_version: str = "") -> ModelSpec:
    return find_model(model_name, model_version)


Model = Annotated[ModelSpec, Depends(_find)]


def triton_routes(triton: Triton) -> APIRouter:
    """The routes of one gateway. Bodies may have any content type: curl and `tritonclient` declare no JSON."""
    router = APIRouter(tags=["Triton"], responses=ERROR_RESPONSES)
    service = triton.service

    def ready_response() -> Response:
        reason = service.unready_reason()
        return JSONResponse({"status": "ok"}) if reason is None else JSONResponse({"error": reason}, 503)

    async def read_body(request: Request) -> bytes:
        body, encoding = await request.body(), request.headers.get("content-encoding")
        note_size(request, len(body), service.heavy_work)
        await next_turn(request)
        plain = decompressed(body, encoding, service.section.max_body_bytes)
        await request.state.held.reserve(BYTES_PER_BODY_BYTE * max(0, len(plain) - len(body)), "its body")
        return plain

    async def parse(body: bytes) -> Any:
        try:
            return await parse_json(body, service.section.max_body_values, service.heavy_work)
        except json.JSONDecodeError as error:
            raise InvalidRequest(f"the body is not JSON: {error.msg}") from None

    async def read_generate(model: ModelSpec, request: Request) -> InferRequest:
        body = await parse(await read_body(request))
        if not isinstance(body, dict):
            raise InvalidRequest("the body is not an object")
        client_id = body.get("id") or ""
        if not isinstance(client_id, str):
            raise InvalidRequest("id must be a string", "id")
        parameters = {name: value for name, value in flat_fields(body).items() if isinstance(value, str)}
        traceparent = request.headers.get("traceparent", "")
        return InferRequest(
            model,
            [row_of_json(model, body, triton.limits)],
            client_id,
            parameters=parameters,
            traceparent=traceparent,
            max_numbers=triton.limits.max_numbers,
        )

    @router.get("/v2")
    async def get_server_metadata() -> dict[str, Any]:
        """Name, version and extensions of the server."""
        return server_metadata()

    @router.get("/v2/health/live")
    async def live() -> dict[str, str]:
        """Whether the process lives."""
        return {"status": "ok"}

    @router.get("/v2/health/ready")
    async def ready() -> Response:
        """Whether requests can run now."""
        return ready_response()

    @router.get("/v2/models/stats")
    async def all_statistics() -> dict[str, Any]:
        """Counts of the requests of all models."""
        return {"model_stats": [each.describe(name) for name, each in triton.statistics.items()]}

    @router.post("/v2/repository/index")
    async def repository_index() -> list[dict[str, str]]:
        """All models and whether they are ready."""
        return triton.index()

    @router.get(MODEL + "/ready")
    @router.get(VERSIONED + "/ready")
    async def model_ready(model: Model) -> Response:
        """Whether requests to a model can run now."""
        return ready_response()

    @router.get(MODEL)
    @router.get(VERSIONED)
    async def model_metadata(model: Model) -> dict[str, Any]:
        """Names, types and shapes of a model's inputs and outputs."""
        return model.metadata()

    @router.get(MODEL + "/config")
    @router.get(VERSIONED + "/config")
    async def model_config(model: Model) -> dict[str, Any]:
        """A model's configuration."""
        return model.configuration(triton.limits.max_batch_size)

    @router.get(MODEL + "/stats")
    @router.get(VERSIONED + "/stats")
    async def model_statistics(model: Model) -> dict[str, Any]:
        """Counts of the requests of a model."""
        return {"model_stats": [triton.statistics[model.name].describe(model.name)]}

    @router.post(MODEL + "/generate", response_class=Response, openapi_extra=JSON_BODY)
    @router.post(VERSIONED + "/generate", response_class=Response, openapi_extra=JSON_BODY)
    async def generate(model: Model, request: Request) -> Response:
        """One response to a JSON object of inputs, such as text_input and max_tokens."""
        infer_request = await read_generate(model, request)
        return InferAnswer(triton, infer_request, lambda outputs: (generate_object(infer_request, outputs), ()))

    @router.post(
        MODEL + "/generate_stream",
        response_class=Response,
        responses={200: {"content": EVENTS, "description": "The responses"}},
        openapi_extra=JSON_BODY,
    )
    @router.post(
        VERSIONED + "/generate_stream",
        response_class=Response,
        responses={200: {"content": EVENTS, "description": "The responses"}},
        openapi_extra=JSON_BODY,
    )
    async def generate_stream(model: Model, request: Request) -> Response:
        """The same as server-sent events: with stream one for each piece of the text, else one for each answer."""
        return GenerateStream(triton, await read_generate(model, request), service.section.first_token_timeout_s)

    @router.post(MODEL + "/infer", response_class=Response, openapi_extra=JSON_BODY)
    @router.post(VERSIONED + "/infer", response_class=Response, openapi_extra=JSON_BODY)
    async def infer(model: Model, request: Request) -> Response:
        """One response to named tensors, as JSON or as raw bytes after the JSON."""
        body = await read_body(request)
        head, raw = split_body(body, request.headers.get(HEADER_LENGTH))
        document = await parse(head)
        traceparent = request.headers.get("traceparent", "")
        infer_request, is_raw = read_infer_request(model, document, raw, triton.limits, traceparent)
        return InferAnswer(
            triton, infer_request, lambda outputs: describe_infer_response(infer_request, outputs, is_raw)
        )

    return router
