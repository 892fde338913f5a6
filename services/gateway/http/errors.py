"""Turns errors into error objects of OpenAI, Anthropic, KServe or llama.cpp with an HTTP status.

No other module does it.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import TypeAdapter
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope
from typing_extensions import TypedDict

from services.common.errors import ContextLengthExceeded, InvalidRequest, TwostrokeError
from services.common.shorten import MAX_QUOTED_CHARACTERS, shorten
from services.gateway.apis.anthropic.answer_objects import ErrorBody as AnthropicErrorBody
from services.gateway.apis.anthropic.answer_objects import ErrorObject as AnthropicErrorObject
from services.gateway.metrics.gateway_metrics import GatewayMetrics

log = structlog.get_logger()

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")  # that a route may have
HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
# OpenAI's error types; clients look at the status first.
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
ANTHROPIC_TYPES = {
    **TYPES,
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
LLAMA_CPP_TYPES = {**TYPES, 404: "not_found_error", 501: "not_supported_error", 503: "unavailable_error"}
LLAMA_CPP_PATHS = frozenset({"/completion", "/completions", "/infill", "/props", "/slots"})


class ErrorObject(TypedDict):
    """An error: `message` is for people, `code` for programs, `param` names the field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """OpenAI's error body."""

    error: ErrorObject


class TextErrorBody(TypedDict):
    """The error body of KServe's inference protocol, version 2."""

    error: str


class LlamaCppErrorObject(TypedDict):
    """An error: `code` is the HTTP status."""

    code: int
    message: str
    type: str


class LlamaCppErrorBody(TypedDict):
    """llama.cpp's error body."""

    error: LlamaCppErrorObject


STATUS_DESCRIPTIONS = {
    400: "The request is wrong",
    401: "No valid API key",
    403: "Not allowed",
    404: "Unknown model",
    408: "The request did not arrive in time",
    413: "The body is too large",
    415: "The body is not JSON",
    429: "Too many requests: see Retry-After",
    500: "A bug or a failed request",
    503: "Not ready",
    504: "The request took too long",
}
# FastAPI would make the schema of a response's model again for every route, which took most of the gateway's start.
_REFERENCES, _DEFINITIONS = TypeAdapter.json_schemas(
    [
        (model, "serialization", TypeAdapter(model))
        for model in (ErrorBody, AnthropicErrorBody, TextErrorBody, LlamaCppErrorBody)
    ],
    ref_template="#/components/schemas/{model}",
)
ERROR_SCHEMAS: dict[str, Any] = _DEFINITIONS["$defs"]  # by name, for the OpenAPI document


def _error_responses(model: type) -> dict[int | str, dict[str, Any]]:
    content = {"application/json": {"schema": _REFERENCES[model, "serialization"]}}
    return {status: {"description": text, "content": content} for status, text in STATUS_DESCRIPTIONS.items()}


ERROR_RESPONSES = _error_responses(ErrorBody)
ANTHROPIC_ERROR_RESPONSES = _error_responses(AnthropicErrorBody)
INFERENCE_ERROR_RESPONSES = _error_responses(TextErrorBody)
LLAMA_CPP_ERROR_RESPONSES = _error_responses(LlamaCppErrorBody)


def error_object(message: str, *, status: int, code: str | None, param: str | None = None) -> ErrorBody:
    """An error body as in OpenAI's reference, "Error codes"."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    param = None if param is None else shorten(param, MAX_QUOTED_CHARACTERS)
    return {"error": {"message": shorten(message), "type": kind, "param": param, "code": code}}


def error_body(message: str, *, status: int, code: str | None) -> bytes:
    """An error body as JSON."""
    return to_json(error_object(message, status=status, code=code, param=None))


def describe(error: Exception) -> tuple[int, ErrorBody]:
    """Status and body for any exception of a handler. An unexpected one is logged, and its text is not sent."""
    if isinstance(error, TwostrokeError):
        status = error.http_status
        return status, error_object(str(error), status=status, code=error.code, param=error.param)
    if isinstance(error, RequestValidationError):
        message, param = _describe_validation(error)
        return 400, error_object(message, status=400, code="invalid_request", param=param)
    if isinstance(error, HTTPException):
        code = HTTP_CODES.get(error.status_code, "http_error")
        return error.status_code, error_object(str(error.detail), status=error.status_code, code=code)
    log.error("unexpected error in an HTTP request", exc_info=error)
    return 500, error_object(f"internal error: {type(error).__name__}", status=500, code="internal")


def anthropic_error(error: Exception, request_id: str) -> AnthropicErrorBody:
    """The same as Anthropic's object, see "Errors" in its reference."""
    status, body = describe(error)
    kind = ANTHROPIC_TYPES.get(status, "invalid_request_error")
    described: AnthropicErrorObject = {"type": kind, "message": body["error"]["message"]}
    if isinstance(error, RequestValidationError) and (code := error.errors()[0].get("ctx", {}).get("error_code")):
        described["details"] = {"error_code": code}
    return {"type": "error", "error": described, "request_id": request_id}


def llama_cpp_error(error: Exception) -> LlamaCppErrorBody:
    """The same as llama.cpp's object."""
    status, body = describe(error)
    kind = LLAMA_CPP_TYPES.get(status, body["error"]["type"])
    if body["error"]["code"] == ContextLengthExceeded.code:
        kind = "exceed_context_size_error"
    return {"error": {"code": status, "message": body["error"]["message"], "type": kind}}


def error_response(error: Exception, scope: Scope) -> Response:
    """The whole answer to a failed request, with Retry-After if a retry may help."""
    status, body = describe(error)
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException) and error.headers:
        headers.update(error.headers)
    if isinstance(error, TwostrokeError):
        if error.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        elif status == 429:
            headers["retry-after"] = "1"
        if status == 401:
            headers["www-authenticate"] = "Bearer"
    answer: ErrorBody | TextErrorBody | AnthropicErrorBody | LlamaCppErrorBody = body
    if is_inference_path(scope["path"]):
        answer = {"error": body["error"]["message"]}
    elif is_anthropic(scope):
        answer = anthropic_error(error, scope["state"]["request_id"])
    elif scope["path"] in LLAMA_CPP_PATHS:
        answer = llama_cpp_error(error)
    return Response(to_json(answer), status, headers, media_type="application/json")


def is_inference_path(path: str) -> bool:
    """Whether errors of this path have the form of KServe's inference protocol, version 2."""
    return path == "/v2" or path.startswith("/v2/")


def is_anthropic(scope: Scope) -> bool:
    """Whether the request expects answers in Anthropic's form. Both vendors have the path /v1/models."""
    path = scope["path"]
    if path.startswith("/v1/models"):
        return any(name == b"anthropic-version" for name, _ in scope["headers"])
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def add_error_handlers(app: FastAPI, metrics: GatewayMetrics) -> None:
    """Makes all routes answer with error objects. Counts validation errors; others are counted where they arise."""

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.detail == "Not Found":  # Starlette's, without a name
            path = shorten(request.url.path, MAX_QUOTED_CHARACTERS)
            error = HTTPException(404, f"this server has no {request.method} {path}", error.headers)
        if isinstance(error, HTTPException) and error.status_code == 405:
            error = HTTPException(405, error.detail, {"allow": ", ".join(_allowed_methods(app, request.scope))})
        if isinstance(error, RequestValidationError):
            metrics.on_rejected(InvalidRequest(""))
        return error_response(error, request.scope)

    for kind in (TwostrokeError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, handle)


def _allowed_methods(app: FastAPI, scope: Scope) -> list[str]:
    """The methods of all routes with this path: Starlette's own header names those of the first one alone."""
    methods = [
        method
        for method in METHODS
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in app.router.routes)
    ]
    return [*methods, "HEAD"] if "GET" in methods else methods  # see `HeadRequests`


def _describe_validation(error: RequestValidationError) -> tuple[str, str | None]:
    """Message and field of the first validation error."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return f"the body is not JSON: {first['ctx']['error']}", None
    param = _param(first["loc"], error.body)
    field = first.get("ctx", {}).get("field")  # set if a rule for the whole object is broken
    if field is not None:
        param = f"{param}.{field}" if param else field
        return f"{param}: {first['msg']}", param
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing" or "input" not in first:
        return f"{param or 'the body'}: {message}", param
    return f"{param or 'the body'} is {_short(first['input'])}: {message}", param


def _param(loc: Sequence[str | int], body: Any) -> str | None:
    """The path of a field, such as `messages[0].content`. Leaves out tags of unions, such as `<texts>`."""
    path = ""
    for step in loc[1:] if loc and loc[0] == "body" else loc:
        if isinstance(step, int) and isinstance(body, list):
            path += f"[{step}]"
            body = body[step] if 0 <= step < len(body) else None
        elif isinstance(step, str) and not step.startswith("<") and isinstance(body, Mapping):
            name = shorten(step, MAX_QUOTED_CHARACTERS)
            path += f".{name}" if path else name
            body = body.get(step)
    return path or None


def _short(value: Any) -> str:
    shortener = reprlib.Repr()
    shortener.maxlevel = 2  # levels of nesting; each level shows up to six elements
    shortener.maxstring = shortener.maxother = shortener.maxlong = 60
    return shortener.repr(value)
