"""The prompts of one request to continue: a text, token ids, or a list of either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from services.common.config import MAX_PROMPTS
from services.common.errors import InvalidRequest
from services.gateway.apis.shared.request_model import TokenIdList, at_most
from services.gateway.request.context_length import too_long


def _kind_of_prompt(value: Any) -> str:
    """Decides by the first element, so that a long list is not tried as each kind in turn."""
    if not isinstance(value, list):
        return "<text>"
    first = value[0] if value else None
    return {str: "<texts>", list: "<token_id_lists>"}.get(type(first), "<token_ids>")


Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(fail_fast=True), at_most(MAX_PROMPTS), Tag("<texts>")]
    | Annotated[TokenIdList, Tag("<token_ids>")]
    | Annotated[list[TokenIdList], Field(fail_fast=True), at_most(MAX_PROMPTS), Tag("<token_id_lists>")],
    Discriminator(_kind_of_prompt),
]


def prompt_list(given: str | list[Any]) -> list[str] | list[list[int]]:
    """All prompts of a `Prompt`, one element each."""
    if isinstance(given, str):
        return [given]
    return [given] if given and isinstance(given[0], int) else given


def check_prompts(
    prompts: Sequence[str | Sequence[Any]],
    max_prompts: int,
    max_prompt_len: int,
    *,
    are_cut: bool,
    num_embeds: int = 0,
) -> None:
    """Raises `InvalidRequest` for no prompts, too many, or one that cannot fit.

    `are_cut`: whether the request says how many of their tokens to keep. `num_embeds`: prompts of embeddings beside
    them.
    """
    num_prompts = num_embeds + len(prompts)
    if not 1 <= num_prompts <= max_prompts:
        raise InvalidRequest(f"there are {num_prompts} prompts, must be 1 to {max_prompts}", "prompt")
    longest = max(prompts, key=len, default=None)
    if isinstance(longest, list) and len(longest) > max_prompt_len and not are_cut:  # before copying them costs time
        raise too_long(max_prompt_len, f"a prompt has {len(longest)}", "prompt", len(longest))
