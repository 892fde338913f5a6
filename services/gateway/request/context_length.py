"""Checks that a prompt and its answer fit into the model's context."""

from __future__ import annotations

from services.common.errors import ContextLengthExceeded, InvalidRequest
from services.pb import gateway_pb2

SHORTEN = "Please reduce the length of the input prompt: it is longer than the model's context length allows."


def check_prompt_length(num_tokens: int, max_model_len: int) -> None:
    """Raises `ContextLengthExceeded` if a prompt leaves no room for one token of an answer."""
    if num_tokens >= max_model_len:
        raise too_long(
            max_model_len,
            f"at least {num_tokens + 1} were requested: {num_tokens} of the prompt and 1 for the answer",
            "prompt",
            num_tokens,
        )


def num_kept_tokens(message: gateway_pb2.GenerateRequest, max_model_len: int) -> int:
    """How many of a prompt's tokens `truncate_prompt_tokens` keeps at most."""
    if message.truncate_prompt_tokens:
        return message.truncate_prompt_tokens
    max_tokens = message.max_tokens if message.HasField("max_tokens") else message.default_max_tokens
    if max_tokens >= max_model_len:
        raise InvalidRequest(
            f"max_tokens is {max_tokens}, max_model_len is {max_model_len}: no prompt can be cut to leave so much room",
            "max_tokens",
        )
    return max_model_len - max(1, max_tokens)


def read_max_tokens(
    message: gateway_pb2.GenerateRequest,
    num_prompt_tokens: int,
    min_tokens: int,
    max_model_len: int,
    *,
    is_strict: bool,
) -> int:
    """The given max_tokens, lowered to the rest of the context unless `is_strict`. `min_tokens` is never lowered.

    Raises `ContextLengthExceeded`.
    """
    room = max_model_len - num_prompt_tokens
    if min_tokens > room:
        raise _asks_too_much(num_prompt_tokens, "min_tokens", min_tokens, max_model_len)
    if not message.HasField("max_tokens"):
        return min(room, message.default_max_tokens or room)
    if message.max_tokens > room and is_strict:
        raise _asks_too_much(num_prompt_tokens, "max_tokens", message.max_tokens, max_model_len)
    return min(room, message.max_tokens)


def _asks_too_much(num_prompt_tokens: int, field: str, value: int, max_model_len: int) -> ContextLengthExceeded:
    return too_long(
        max_model_len,
        f"{num_prompt_tokens + value} were requested: {num_prompt_tokens} of the prompt and {value} by {field}",
        field,
        num_prompt_tokens,
        advice=f"Please reduce {field} or the length of the input prompt.",
    )


def too_long(
    max_model_len: int, what: str, param: str, num_prompt_tokens: int | None = None, *, advice: str = SHORTEN
) -> ContextLengthExceeded:
    """The error of a prompt or an answer that does not fit; `param` is the field to blame."""
    # Clients that shorten a chat and retry look for these first words; LangChain looks for the code, also in the text.
    # The advice has the words of vLLM and SGLang.
    text = f"This model's maximum context length is {max_model_len} tokens, but {what}"
    message = f"{text} ({ContextLengthExceeded.code}). {advice}"
    return ContextLengthExceeded(message, param, max_model_len=max_model_len, num_prompt_tokens=num_prompt_tokens)
