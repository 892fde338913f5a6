"""Errors as Text Generation Inference has them."""

from __future__ import annotations

from starlette.types import Scope
from typing_extensions import TypedDict

from services.common.errors import AbortedByCaller, CapacityError, QueueTimeout
from services.gateway.http.errors import TYPES, Dialect, describe, error_responses

STATUSES = {400: 422, 500: 424}  # where they are others than ours
OVERLOADED = CapacityError, QueueTimeout


class TgiErrorBody(TypedDict):
    """Text Generation Inference's error body."""

    error: str
    error_type: str


def tgi_error(error: Exception) -> TgiErrorBody:
    """The error's text, with the word by which clients choose an exception."""
    status, body = describe(error)
    if isinstance(error, OVERLOADED):
        kind = "overloaded"
    elif isinstance(error, AbortedByCaller):
        kind = "incomplete_generation"
    elif status in TYPES:
        kind = TYPES[status]
    else:
        kind = "validation" if status < 500 else "generation"
    return {"error": body["error"]["message"], "error_type": kind}


def is_text_generation(scope: Scope) -> bool:
    """Whether a request is one of this dialect. At paths that others have, too, it is once its body has been read."""
    return scope["path"] == "/generate_stream" or scope["state"].get("is_text_generation", False)


TGI = Dialect(is_text_generation, TgiErrorBody, lambda error, scope: tgi_error(error), statuses=STATUSES)
ERROR_RESPONSES = error_responses(TgiErrorBody, STATUSES)
