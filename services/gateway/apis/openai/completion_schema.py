"""POST /v1/completions, as in OpenAI's reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NotRequired

import pydantic
from pydantic import Discriminator, Field, Tag
from typing_extensions import TypedDict

from services.common.config import MAX_PROMPTS
from services.gateway.apis.shared.answer_objects import (
    FinishReasonName,
    PromptLogprobs,
    RequestMetrics,
    TimingsObject,
    UsageObject,
)
from services.gateway.apis.shared.generation_fields import GenerationFields
from services.gateway.apis.shared.request_model import CountOrAll, TokenIdList, at_most


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


PromptEmbedsText = str | Annotated[list[str], Field(fail_fast=True), at_most(MAX_PROMPTS)]


class CompletionRequest(GenerationFields):
    """The prompts to continue, and the options of the answers."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationFields.unsupported,
        "kv_transfer_params": (),
        "thinking_token_budget": (),
        "vllm_xargs": ({},),
        # fields of chats
        "functions": ([],),
        "max_completion_tokens": (),
        "return_progress": (False,),
        "max_reasoning_tokens": (),
        "messages": (),
        "tools": ([],),
        "top_logprobs": (),
    }

    prompt: Prompt | None = Field(None, description="A text, token ids, or a list of either; else prompt_embeds")
    prompt_embeds: PromptEmbedsText | None = Field(
        None,
        description="A prompt of embeddings, or a list of them, answered before `prompt`: tensors [tokens, hidden] as "
        "torch.save writes them, in base64. Only with gateway.enable_prompt_embeds",
    )
    suffix: str | None = Field(
        None,
        description="Text after the answer, which then stands between prompt and suffix; empty: none. Only for models "
        "whose tokenizer has tokens for that, and not with echo or truncate_prompt_tokens",
    )
    echo: bool | None = Field(None, description="Start every text with its prompt")
    logprobs: CountOrAll | None = Field(
        None,
        description="Give the log-probability of each token and of this many most likely tokens, "
        "up to gateway.max_logprobs; -1: of the whole vocabulary. All answers together have at most "
        "gateway.max_request_logprobs",
    )

    @pydantic.field_validator("logprobs", mode="before")
    @classmethod
    def _no_logprobs(cls, value: Any) -> Any:
        return None if value is False else value  # some clients send false for none

    @property
    def embeds(self) -> list[str]:
        """All prompts of embeddings, one element each."""
        return [self.prompt_embeds] if isinstance(self.prompt_embeds, str) else self.prompt_embeds or []

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """All prompts but those of embeddings, one element each. Beside these, an empty prompt is none."""
        if self.prompt is None or (self.prompt_embeds and not self.prompt):
            return []
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]


class LegacyLogprobs(TypedDict):
    """Aligned lists with one element per token; `text_offset` counts characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One answer, or a piece of it; `index` counts the answers to the first prompt, then to the next."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: FinishReasonName | None
    stop_reason: NotRequired[str | int | None]
    beam_score: NotRequired[float]  # with use_beam_search
    prompt_logprobs: NotRequired[PromptLogprobs | None]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    timings: NotRequired[TimingsObject]  # where there are several answers


class CompletionObject(TypedDict):
    """The whole answer, or one event of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: NotRequired[str]
    choices: list[CompletionChoice]
    usage: NotRequired[UsageObject | None]
    timings: NotRequired[TimingsObject]
    metrics: NotRequired[RequestMetrics]
