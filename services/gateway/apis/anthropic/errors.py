"""Errors as Anthropic's API has them."""

from __future__ import annotations

from typing import Literal, NotRequired

from fastapi.exceptions import RequestValidationError
from starlette.types import Scope
from typing_extensions import TypedDict

from services.gateway.http.errors import TYPES, Dialect, describe, error_responses
from services.gateway.http.headers import ANTHROPIC_HEADER, header_values

KINDS = {
    **TYPES,
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicErrorDetails(TypedDict):
    """Why a request was refused, in a word of Anthropic's."""

    error_code: str


class AnthropicErrorObject(TypedDict):
    """What is wrong. `details` tell a program what to do instead, where clients know how."""

    type: str
    message: str
    details: NotRequired[AnthropicErrorDetails]


class AnthropicErrorBody(TypedDict):
    """An error, as a whole answer or as an event."""

    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str


def anthropic_error(error: Exception, request_id: str) -> AnthropicErrorBody:
    """The same as Anthropic's object, see "Errors" in its reference."""
    status, body = describe(error)
    kind = KINDS.get(status, "invalid_request_error")
    described: AnthropicErrorObject = {"type": kind, "message": body["error"]["message"]}
    if isinstance(error, RequestValidationError) and (code := error.errors()[0].get("ctx", {}).get("error_code")):
        described["details"] = {"error_code": code}
    return {"type": "error", "error": described, "request_id": request_id}


def is_anthropic(scope: Scope) -> bool:
    """Whether the request expects answers in Anthropic's form. Both vendors have the path /v1/models."""
    path = scope["path"]
    if path.startswith("/v1/models"):
        return bool(header_values(scope["headers"], b"anthropic-version"))
    return path == "/v1/messages" or path.startswith("/v1/messages/")


ANTHROPIC = Dialect(
    is_anthropic,
    AnthropicErrorBody,
    lambda error, scope: anthropic_error(error, scope["state"]["request_id"]),
    ANTHROPIC_HEADER,
)
ERROR_RESPONSES = error_responses(AnthropicErrorBody)
