"""Errors as Ollama has them, and the name of the model in its requests."""

from __future__ import annotations

from typing_extensions import TypedDict

from services.gateway.http.errors import Dialect, error_responses, error_text
from services.gateway.request.model_names import ModelNames

TAG = ":latest"  # which Ollama adds to a name without one


class OllamaErrorBody(TypedDict):
    """Ollama's error body."""

    error: str


def ollama_error(error: Exception) -> OllamaErrorBody:
    """The error's text."""
    return {"error": error_text(error)}


def name_without_tag(name: str, served: ModelNames) -> str:
    """The name by which a model is served here, if it is served without Ollama's tag."""
    is_served = name in served.names or name in served.adapters
    return name if is_served else name.removesuffix(TAG)


OLLAMA = Dialect(
    lambda scope: scope["path"].startswith("/api/"), OllamaErrorBody, lambda error, scope: ollama_error(error)
)
ERROR_RESPONSES = error_responses(OllamaErrorBody)
