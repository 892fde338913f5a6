"""Errors as Cohere has them."""

from __future__ import annotations

from typing_extensions import TypedDict

from services.gateway.http.errors import Dialect, error_responses, error_text

CHAT_PATHS = ("/v2/chat", "/cohere/v2/chat")  # the latter is vLLM's


class CohereErrorBody(TypedDict):
    """Cohere's error body, see "Errors" in its reference. `id` is that of the request."""

    id: str
    message: str


COHERE = Dialect(
    lambda scope: scope["path"] in ("/v2/rerank", "/v2/embed", "/v1/embed", *CHAT_PATHS),
    CohereErrorBody,
    lambda error, scope: {"id": scope["state"]["request_id"], "message": error_text(error)},
)
ERROR_RESPONSES = error_responses(CohereErrorBody)
