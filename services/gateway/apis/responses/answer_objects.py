"""The answer of the Responses API. Its items and events are made in `format.py` and `output_items.py`."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from services.gateway.apis.responses.raw_messages import RawMessage
from services.gateway.apis.shared.timings import TimingsObject


class InputTokensDetails(TypedDict):
    """How many tokens of the prompt were found in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    """How many tokens of the answer were reasoning."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """Token counts; SGLang names those of input and output `prompt_tokens` and `completion_tokens`."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    prompt_tokens: int
    completion_tokens: int


class InputTokens(TypedDict):
    """How many tokens the prompt of a request would have."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class ResponseError(TypedDict):
    """Why an answer failed."""

    code: str
    message: str


class IncompleteDetails(TypedDict):
    """Why an answer is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseObject(TypedDict):
    """The answer, and the options of the request with their defaults."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    frequency_penalty: float
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    timings: NotRequired[TimingsObject]
    input_messages: NotRequired[list[RawMessage]]  # with enable_response_messages
    output_messages: NotRequired[list[RawMessage]]
