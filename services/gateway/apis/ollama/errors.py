"""Errors as Ollama has them."""

from __future__ import annotations

from typing_extensions import TypedDict

from services.gateway.http.errors import Dialect, error_responses, error_text


class OllamaErrorBody(TypedDict):
    """Ollama's error body."""

    error: str


def ollama_error(error: Exception) -> OllamaErrorBody:
    """The error's text."""
    return {"error": error_text(error)}


OLLAMA = Dialect(
    lambda scope: scope["path"].startswith("/api/"), OllamaErrorBody, lambda error, scope: ollama_error(error)
)
ERROR_RESPONSES = error_responses(OllamaErrorBody)
