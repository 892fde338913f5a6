"""Objects that answers to completions and chats share."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from services.gateway.apis.shared.timings import TimingsObject

FinishReasonName = Literal["stop", "length", "abort", "tool_calls"]


class PromptTokensDetails(TypedDict):
    """How many prompt tokens were found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """How many tokens of the answers were reasoning."""

    reasoning_tokens: int


class UsageObject(TypedDict):
    """Token counts of all prompts and answers of a request. Before the last event: of that event's answer only."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptTokensDetails]
    completion_tokens_details: NotRequired[CompletionTokensDetails]
    reasoning_tokens: NotRequired[int]  # the same number, where clients of SGLang look for it


class RequestMetrics(TypedDict):
    """How long a request took, as in vLLM, with gateway.request_metrics; null where there is nothing to measure."""

    time_to_first_token_ms: float | None  # from the first step
    generation_time_ms: float | None  # from the first token to the last
    queue_time_ms: float | None  # before the first step
    mean_itl_ms: float | None  # from one token to the next
    tokens_per_second: float | None  # from the first step to the last token


class PromptLogprob(TypedDict):
    """A token of the prompt, or another token at the same position; `rank` 1 is the most likely.

    The rank of a prompt's token counts all tokens of the vocabulary; null for tokens of logprob_token_ids.
    """

    logprob: float
    rank: int | None
    decoded_token: str


# One entry per prompt token, by token id; null for the first token, since nothing precedes it.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ModelCapabilities(TypedDict):
    """What a served model can do, in Mistral's words."""

    completion_chat: bool
    completion_fim: bool
    function_calling: bool
    vision: bool


class ModelObject(TypedDict):
    """The served model under one of its names, or an adapter; `vocab_size` is the number of token ids.

    `root` is its directory. `parent` is the name of the model that an adapter belongs to, null for the model itself.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    vocab_size: int
    type: Literal["base"]  # as with Mistral
    capabilities: ModelCapabilities


class CapableModel(TypedDict):
    """What a served model can do, in llama.cpp's words; nothing if it generates no text."""

    name: str
    model: str
    type: Literal["model"]
    capabilities: list[Literal["completion", "multimodal"]]


class ModelList(TypedDict):
    """The served model under all its names, the first name first, then its adapters; `models` as in llama.cpp."""

    object: Literal["list"]
    data: list[ModelObject]
    models: list[CapableModel]


class AnswerObject(TypedDict):
    """What a whole answer and each event of a streamed one have, beside their `object` and `choices`."""

    id: str
    created: int
    model: str
    system_fingerprint: NotRequired[str]
    timings: NotRequired[TimingsObject]
    metrics: NotRequired[RequestMetrics]
