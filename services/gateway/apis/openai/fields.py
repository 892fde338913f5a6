"""The fields that OpenAI's completions and chats share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import pydantic
from pydantic import Field
from pydantic_core import PydanticCustomError

from services.common.sampling_params import MAX_LOGPROB_TOKENS
from services.gateway.apis.shared.feature_fields import FeatureFields
from services.gateway.apis.shared.generation_fields import (
    IGNORED,
    AnswerFields,
    BeamFields,
    LogitBias,
    SamplingFields,
)
from services.gateway.apis.shared.other_servers import LLAMA_CPP_OPTIONS, OF_OTHER_SERVERS
from services.gateway.apis.shared.request_model import CountOrAll, RequestModel, UInt32, at_most
from services.gateway.apis.shared.structured_output import StructuredOutputFields


class StreamOptions(RequestModel):
    """Options of a streamed answer."""

    include_usage: bool | None = Field(None, description="Send a last chunk with the token counts")
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: give every chunk the counts of its answer so far"
    )
    include_obfuscation: bool | None = Field(None, description=IGNORED)


class UsageFields(RequestModel):
    """Which counts of tokens a stream has."""

    stream_options: StreamOptions | None = None

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends with token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_running_usage(self) -> bool:
        """Whether every chunk of a stream has token counts."""
        return self.has_usage and bool(self.stream_options.continuous_usage_stats)


class OpenAIFields(SamplingFields, AnswerFields, UsageFields, BeamFields, StructuredOutputFields, FeatureFields):
    """The fields that completions and chats share. Null always means the default."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {**OF_OTHER_SERVERS, **LLAMA_CPP_OPTIONS}

    n_predict: CountOrAll | None = Field(
        None, description="llama.cpp's name of max_tokens; -1: to the end of the context"
    )
    logit_bias: LogitBias = None
    extra_key: str | None = Field(None, description="SGLang's second part of cache_salt")
    prompt_logprobs: CountOrAll | None = Field(
        None,
        description="Give the log-probability of each prompt token, and of this many most likely tokens, at most 20; "
        "-1: of all of the vocabulary. gateway.max_request_logprobs counts them once per answer",
    )
    logprob_token_ids: Annotated[list[UInt32] | None, at_most(MAX_LOGPROB_TOKENS)] = Field(
        None,
        description="With logprobs: give the log-probabilities of these tokens at every position, in place of the most "
        "likely ones",
    )
    return_token_ids: bool | None = Field(
        None, description="Give the token ids of the answer in addition to its text, and once those of the prompt"
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="In log-probabilities, name tokens token_id:ID instead of by their text"
    )

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer has log-probabilities. In `logprobs` completions have a count, chats a switch."""
        given = getattr(self, "logprobs", None)
        return given is not None and given is not False

    @property
    def num_named(self) -> int:
        """How many tokens the request names in `logprob_token_ids`."""
        return len(set(self.logprob_token_ids or ()))

    @pydantic.model_validator(mode="after")
    def _check_length(self) -> OpenAIFields:
        if self.max_tokens is not None and self.n_predict not in (None, self.max_tokens):
            context = {"one": self.max_tokens, "other": self.n_predict, "field": "n_predict"}
            message = "max_tokens is {one} and n_predict {other}: they mean the same"
            raise PydanticCustomError("n_predict", message, context)
        return self

    @pydantic.model_validator(mode="after")
    def _check_named_tokens(self) -> OpenAIFields:
        context = {"field": "logprob_token_ids"}  # the messages have the words of vLLM
        if self.logprob_token_ids == []:
            raise PydanticCustomError("logprobs", "must not be an empty list", context)
        if self.logprob_token_ids and not self.has_logprobs:
            raise PydanticCustomError("logprobs", "logprobs must be set when using `logprob_token_ids`", context)
        return self

    @pydantic.model_validator(mode="after")
    def _check_stream_options(self) -> OpenAIFields:
        if self.stream_options is not None and not self.stream:
            message = "stream_options are allowed only when stream is true"
            raise PydanticCustomError("stream_options", message, {"field": "stream_options"})
        return self
