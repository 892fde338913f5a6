"""Errors as llama.cpp has them: of its own routes, and of the one for embeddings."""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict

from services.common.errors import ContextLengthExceeded
from services.gateway.http.errors import TYPES, Dialect, ErrorObject, describe, error_responses

KINDS = {**TYPES, 404: "not_found_error", 501: "not_supported_error", 503: "unavailable_error"}
PATHS = frozenset(
    {"/completion", "/completions", "/embedding", "/embeddings", "/infill", "/lora-adapters", "/props", "/slots"}
)
CHATS = "/chat/completions"  # llama.cpp's second path of OpenAI's chats


class LlamaCppErrorObject(TypedDict):
    """An error: `code` is the HTTP status."""

    code: int
    message: str
    type: str
    n_prompt_tokens: NotRequired[int]  # of a prompt that is too long, if they have been counted
    n_ctx: NotRequired[int]  # of the model, with such an error of this process


class LlamaCppErrorBody(TypedDict):
    """llama.cpp's error body."""

    error: LlamaCppErrorObject


def llama_cpp_error(error: Exception) -> LlamaCppErrorBody:
    """The same as llama.cpp's object."""
    status, body = describe(error)
    kind = KINDS.get(status, body["error"]["type"])
    found: LlamaCppErrorObject = {"code": status, "message": body["error"]["message"], "type": kind}
    if isinstance(error, ContextLengthExceeded):
        found["type"] = "exceed_context_size_error"
        found["message"] = f"request exceeds the available context size: {found['message']}"
        if error.max_model_len is not None:
            found["n_ctx"] = error.max_model_len
        if error.num_prompt_tokens is not None:
            found["n_prompt_tokens"] = error.num_prompt_tokens
    return {"error": found}


class ChatErrorObject(ErrorObject):
    """OpenAI's, with what llama.cpp says of a prompt that is too long."""

    n_prompt_tokens: NotRequired[int]
    n_ctx: NotRequired[int]


class ChatErrorBody(TypedDict):
    """The body of an error of a chat."""

    error: ChatErrorObject


def _chat_error(error: Exception) -> ChatErrorBody:
    found: ChatErrorObject = {**describe(error)[1]["error"]}
    if isinstance(error, ContextLengthExceeded):
        of_llama_cpp = llama_cpp_error(error)["error"]
        found |= {name: of_llama_cpp[name] for name in ("type", "n_prompt_tokens", "n_ctx") if name in of_llama_cpp}
    return {"error": found}


LLAMA_CPP_CHATS = Dialect(
    lambda scope: scope["path"] == CHATS, ChatErrorBody, lambda error, scope: _chat_error(error)
)
LLAMA_CPP = Dialect(
    lambda scope: scope["path"] in PATHS or scope["path"].startswith("/slots/"),
    LlamaCppErrorBody,
    lambda error, scope: llama_cpp_error(error),
)
ERROR_RESPONSES = error_responses(LlamaCppErrorBody)
