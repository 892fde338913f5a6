"""Errors of /v2/rerank as Cohere's API has them."""

from __future__ import annotations

from typing_extensions import TypedDict

from services.gateway.http.errors import Dialect, describe


class CohereErrorBody(TypedDict):
    """Cohere's error body. `id` is that of the request."""

    id: str
    message: str


def cohere_error(error: Exception, request_id: str) -> CohereErrorBody:
    """The error's text, see "Errors" in Cohere's reference."""
    _, body = describe(error)
    return {"id": request_id, "message": body["error"]["message"]}


COHERE = Dialect(
    lambda scope: scope["path"] == "/v2/rerank",
    CohereErrorBody,
    lambda error, scope: cohere_error(error, scope["state"]["request_id"]),
)
