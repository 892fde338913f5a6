"""Turns errors into OpenAI's error objects with an HTTP status, and lets other dialects write theirs.

Each exception is described here alone, also for those dialects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
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

from services.common.errors import InvalidRequest, TwostrokeError
from services.common.shorten import MAX_QUOTED_CHARACTERS, JsonWords, shorten
from services.gateway.metrics.gateway_metrics import GatewayMetrics

log = structlog.get_logger()

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")  # that a route may have
HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
# OpenAI's error types; clients look at the status first.
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ErrorObject(TypedDict):
    """An error: `message` is for people, `code` for programs, `param` names the field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """OpenAI's error body."""

    error: ErrorObject


STATUS_DESCRIPTIONS = {
    400: "The request is wrong",
    401: "No valid API key",
    403: "Not allowed",
    404: "Unknown model",
    408: "The request did not arrive in time",
    413: "The body is too large",
    415: "The body is of another type: not JSON, or where sound is sent no form",
    429: "Too many requests: see Retry-After",
    500: "A bug or a failed request",
    503: "Not ready",
    504: "The request took too long",
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a dialect differs from OpenAI's in what is the same for all routes."""

    is_meant: Callable[[Scope], bool]  # whether a request expects answers of this dialect
    error_body: type  # typed dictionary, for the OpenAPI document
    write_error: Callable[[Exception, Scope], Any]  # makes an `error_body`
    request_id_header: str | None = None  # a second name of the header with the request's id
    statuses: Mapping[int, int] = field(default_factory=dict)  # in place of ours, where they differ


def error_responses(model: type, statuses: Mapping[int, int] = MappingProxyType({})) -> dict[int | str, dict[str, Any]]:
    """What routes whose errors have this body declare, by status. `statuses`: those of `Dialect`.

    FastAPI would make the schema of the model again for every route, which took most of the gateway's start.
    """
    references, _ = _schemas(model)
    content = {"application/json": {"schema": references[model, "serialization"]}}
    return {
        statuses.get(status, status): {"description": text, "content": content}
        for status, text in STATUS_DESCRIPTIONS.items()
    }


def either_responses(*dialects: Mapping[int | str, dict[str, Any]]) -> dict[int | str, dict[str, Any]]:
    """What routes of several dialects declare. `dialects`: what `error_responses` gives for each."""
    found: dict[int | str, dict[str, Any]] = {}
    for status in {status: None for each in dialects for status in each}:
        given = [each[status] for each in dialects if status in each]
        schemas = [each["content"]["application/json"]["schema"] for each in given]
        content = {"application/json": {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}}
        found[status] = {"description": given[0]["description"], "content": content}
    return found


def error_schemas(dialects: Iterable[Dialect]) -> dict[str, Any]:
    """The schemas of all bodies of errors by name, for the OpenAPI document."""
    _, definitions = _schemas(ErrorBody, *(each.error_body for each in dialects))
    return definitions["$defs"]


def _schemas(*models: type) -> tuple[dict[Any, Any], dict[str, Any]]:
    adapters = [(model, "serialization", TypeAdapter(model)) for model in models]
    return TypeAdapter.json_schemas(adapters, ref_template="#/components/schemas/{model}")


ERROR_RESPONSES = error_responses(ErrorBody)


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


def error_text(error: Exception) -> str:
    """What `describe` says of an exception, for people."""
    return describe(error)[1]["error"]["message"]


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
    dialect = dialect_of(scope)
    if dialect is None:
        return Response(to_json(body), status, headers, media_type="application/json")
    answer = dialect.write_error(error, scope)
    return Response(to_json(answer), dialect.statuses.get(status, status), headers, media_type="application/json")


def dialect_of(scope: Scope) -> Dialect | None:
    """The dialect that a request speaks; None if it is OpenAI's. `Envelope` says which there are."""
    return next((each for each in scope["state"]["dialects"] if each.is_meant(scope)), None)


def add_error_handlers(app: FastAPI, metrics: GatewayMetrics) -> None:
    """Makes all routes answer with error objects. Counts validation errors; others are counted where they arise."""

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.detail == "Not Found":  # Starlette's, without a name
            path = shorten(request.scope["path"], MAX_QUOTED_CHARACTERS)
            error = HTTPException(404, f"this server has no {request.method} {path}", error.headers)
        if isinstance(error, HTTPException) and error.status_code == 405:
            path, allowed = shorten(request.scope["path"], MAX_QUOTED_CHARACTERS), _allowed_methods(app, request.scope)
            message = f"this server has no {request.method} {path}, but {' and '.join(allowed)}"
            error = HTTPException(405, message, {"allow": ", ".join(allowed)})
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
    return [*methods, "HEAD"] if "GET" in methods else methods  # see `Envelope`


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
    if loc and loc[0] in ("query", "path"):  # its name stands beside the body
        return shorten(str(loc[1]), MAX_QUOTED_CHARACTERS)
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
    shortener = JsonWords()
    shortener.maxlevel = 2  # levels of nesting; each level shows up to six elements
    shortener.maxstring = shortener.maxother = shortener.maxlong = 60
    return shortener.repr(value)
