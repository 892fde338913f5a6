"""Log-probabilities of answers as OpenAI's chats and Responses have them: one object per token."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import TypedDict

from services.common.token_logprobs import TokenLogprobs
from services.gateway.text.detokenizer import token_bytes
from services.gateway.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # JSON has no minus infinity


class TopLogprob(TypedDict):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TypedDict):
    """A token and the most likely tokens at its position. `bytes` is its UTF-8, maybe an incomplete character."""

    token: str
    logprob: float
    bytes: list[int]
    token_id: int  # as with SGLang
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """The log-probabilities of an answer; one entry per token."""

    content: list[TokenLogprob]
    refusal: None


def token_name(tokenizer: Tokenizer, token_id: int, has_ids: bool) -> str:
    """The text of a token, or with `has_ids` its id as vLLM writes it: several tokens may have the same text."""
    return f"token_id:{token_id}" if has_ids else tokenizer.name_of(token_id)


def chat_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    *,
    has_ids: bool,
    shows_own: bool = False,
) -> ChatLogprobs:
    """The log-probabilities of new tokens for a chat, made when they are encoded.

    `has_ids`: name tokens by their ids. `shows_own`: each token stands among the likely ones of its position, too.
    """

    def describe(token_id: int, logprob: float) -> dict:
        return {
            "token": token_name(tokenizer, token_id, has_ids),
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": list(token_bytes(tokenizer.hf_tokenizer, token_id)),
        }

    def top(token_id: int, each: TokenLogprobs) -> list[dict]:
        has_own = not shows_own or any(other_id == token_id for other_id, _ in each.top)
        return [describe(*pair) for pair in (each.top if has_own else (*each.top, (token_id, each.logprob)))]

    return {
        "content": (
            {**describe(token_id, each.logprob), "token_id": token_id, "top_logprobs": top(token_id, each)}
            for token_id, each in zip(token_ids, logprobs, strict=True)
        ),
        "refusal": None,
    }
