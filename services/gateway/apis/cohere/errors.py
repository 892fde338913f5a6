"""Errors as Cohere has them."""

from __future__ import annotations

from typing_extensions import TypedDict

from services.gateway.http.errors import Dialect, describe, error_responses

CHAT_PATHS = ("/v2/chat", "/cohere/v2/chat")  # the latter is vLLM's


class CohereErrorBody(TypedDict):
    """Cohere's error body. `id` is that of the request."""

    id: str
    message: str


def _write_error(error: Exception, request_id: str) -> CohereErrorBody:
    """The error's text, see "Errors" in Cohere's reference."""
    _, body = describe(error)
    return {"id": request_id, "message": body["error"]["message"]}


COHERE = Dialect(
    lambda scope: scope["path"] in ("/v2/rerank", "/v2/embed", *CHAT_PATHS),
    CohereErrorBody,
    lambda error, scope: _write_error(error, scope["state"]["request_id"]),
)
ERROR_RESPONSES = error_responses(CohereErrorBody)
