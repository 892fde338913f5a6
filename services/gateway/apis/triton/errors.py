"""Errors as KServe's inference protocol, version 2, has them."""

from __future__ import annotations

from starlette.types import Scope
from typing_extensions import TypedDict

from services.gateway.http.errors import Dialect, error_responses, error_text


class TextErrorBody(TypedDict):
    """The error body of KServe's inference protocol, version 2."""

    error: str


def text_error(error: Exception) -> TextErrorBody:
    """The error's text."""
    return {"error": error_text(error)}


def is_inference(scope: Scope) -> bool:
    """Whether the request is one of this protocol, unless it is of another API with paths below /v2."""
    return scope["path"] == "/v2" or scope["path"].startswith("/v2/")


TRITON = Dialect(is_inference, TextErrorBody, lambda error, scope: text_error(error))
ERROR_RESPONSES = error_responses(TextErrorBody)
