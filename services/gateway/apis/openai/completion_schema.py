"""POST /v1/completions, as in OpenAI's reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from services.common.config import MAX_PROMPTS
from services.gateway.apis.openai.answer_objects import AnswerObject, FinishReasonName, PromptLogprobs, UsageObject
from services.gateway.apis.openai.fields import OpenAIFields
from services.gateway.apis.shared.generation_fields import Echo, NamedFields, NumLogprobs, Suffix
from services.gateway.apis.shared.other_servers import OF_CHATS
from services.gateway.apis.shared.prompts import Prompt, prompt_list
from services.gateway.apis.shared.request_model import TokenIdList, at_most
from services.gateway.apis.shared.timings import TimingsObject

PromptEmbedsText = str | Annotated[list[str], Field(fail_fast=True), at_most(MAX_PROMPTS)]


class CompletionRequest(OpenAIFields, NamedFields):
    """The prompts to continue, and the options of the answers."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **OpenAIFields.unsupported,
        **OF_CHATS,
        "return_progress": (False,),
    }

    prompt: Prompt | None = Field(None, description="A text, token ids, or a list of either; else prompt_embeds")
    prompt_embeds: PromptEmbedsText | None = Field(
        None,
        description="A prompt of embeddings, or a list of them, answered before `prompt`: tensors [tokens, hidden] as "
        "torch.save writes them, in base64. Only with gateway.enable_prompt_embeds",
    )
    decoder_prompt: str | TokenIdList | None = Field(
        None, description="Where an encoder reads the prompt: what the decoder begins with, as text or token ids"
    )
    suffix: Suffix = None
    echo: Echo = None
    logprobs: NumLogprobs = None

    @property
    def embeds(self) -> list[str]:
        """All prompts of embeddings, one element each."""
        return [self.prompt_embeds] if isinstance(self.prompt_embeds, str) else self.prompt_embeds or []

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """All prompts but those of embeddings, one element each. Beside these, an empty prompt is none."""
        if self.prompt is None or (self.prompt_embeds and not self.prompt):
            return []
        return prompt_list(self.prompt)


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
    matched_stop: NotRequired[str | int | None]
    beam_score: NotRequired[float]  # with use_beam_search
    prompt_logprobs: NotRequired[PromptLogprobs | None]
    hidden_states: NotRequired[list[float] | None]  # at the end, with return_hidden_states
    token_ids: NotRequired[list[int] | None]
    prompt_token_ids: NotRequired[list[int] | None]
    timings: NotRequired[TimingsObject]  # where there are several answers


class CompletionObject(AnswerObject):
    """The whole answer, or one event of a streamed one."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[UsageObject | None]
