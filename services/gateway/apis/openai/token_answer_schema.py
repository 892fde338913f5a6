"""POST /inference/v1/generate, as in vLLM: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NotRequired

import pydantic
from pydantic import Field
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from services.gateway.apis.openai.answer_objects import FinishReasonName, PromptLogprobs, UsageObject
from services.gateway.apis.openai.fields import OpenAIFields, UsageFields
from services.gateway.apis.shared.feature_fields import NO_FEATURES
from services.gateway.apis.shared.generation_fields import IGNORED, NamedFields, NumLogprobs, Priority
from services.gateway.apis.shared.logprobs import ChatLogprobs
from services.gateway.apis.shared.other_servers import OF_CHATS
from services.gateway.apis.shared.request_model import TokenIdList


class TokenSampling(OpenAIFields):
    """vLLM's `sampling_params`: the options of completions."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **OpenAIFields.unsupported,
        **NO_FEATURES,
        **OF_CHATS,
        "prompt": (),
        "prompt_embeds": (),
        "return_progress": (False,),
        "timings_per_token": (False,),
        "echo": (False,),
        "suffix": ("",),
        "extra_key": (),
        # they belong into the body
        "model": (),
        "stream": (),
    }

    logprobs: NumLogprobs = None
    detokenize: bool | None = Field(None, description="False: there are no texts, so none that end an answer")

    @pydantic.model_validator(mode="after")
    def _check_stop(self) -> TokenSampling:
        if self.detokenize is False and (self.stop or self.stop_regex):
            context = {"field": "stop" if self.stop else "stop_regex"}
            raise PydanticCustomError("stop", "cannot be used with detokenize false", context)
        return self


class TokenAnswerRequest(UsageFields, NamedFields):
    """A prompt of token ids, and the options of the answers."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"features": ({},)}

    token_ids: TokenIdList = Field(description="The prompt")
    sampling_params: TokenSampling = Field(
        default_factory=lambda: TokenSampling(), description="Without max_tokens: to the end of the context"
    )
    model: str | None = Field(None, description="A name of the served model, or of an adapter, or none")
    stream: bool | None = Field(None, description="Send the token ids as server-sent events")
    priority: Priority = None
    cache_salt: str | None = Field(
        None, min_length=1, description="Only requests with the same salt share prompt prefixes"
    )
    kv_transfer_params: dict[str, Any] | None = Field(None, description=f"{IGNORED}: the answer is whole here")

    @pydantic.field_validator("sampling_params", mode="before")
    @classmethod
    def _no_params(cls, value: Any) -> Any:
        return {} if value is None else value


class TokenChoice(TypedDict):
    """One answer, or its new tokens."""

    index: int
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName | None
    token_ids: list[int]


class TokenAnswerObject(TypedDict):
    """The whole answer, or one event of a streamed one."""

    request_id: str
    choices: list[TokenChoice]
    prompt_logprobs: NotRequired[PromptLogprobs | None]
    usage: NotRequired[UsageObject]
