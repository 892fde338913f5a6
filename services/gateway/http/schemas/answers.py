"""What answers to completions and chats share."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

FinishReasonName = Literal["stop", "length", "abort"]


class PromptTokensDetails(TypedDict):
    """Of the prompt tokens, those found in the prefix cache."""

    cached_tokens: int


class UsageObject(TypedDict):
    """Counts of tokens over all prompts and answers of a request; before the last event, of that event's answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptTokensDetails]


class PromptLogprob(TypedDict):
    """Of one token that stands, or could stand, at a place of the prompt; `rank` 1 is the likeliest."""

    logprob: float
    rank: int | None
    decoded_token: str


# One entry a prompt token, by token id; null for the first, before which nothing stands.
PromptLogprobs = list[dict[str, PromptLogprob] | None]
