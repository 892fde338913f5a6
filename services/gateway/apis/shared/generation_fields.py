"""Groups of fields of which the bodies of several dialects are composed: OpenAI's, and widely used ones of vLLM."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic
from fastapi import Request
from pydantic import Field
from pydantic_core import PydanticCustomError

from services.common.sampling_params import MAX_ALLOWED_TOKENS, MAX_LOGIT_BIASES, NUMBERS
from services.gateway.apis.shared.request_model import CountOrAll, Int32, Int64, RequestModel, UInt32, at_most
from services.gateway.http.headers import MAX_CHARACTERS_OF_BODY, REQUEST_ID_HEADER, fault_in, name_by_body
from services.gateway.request.read_request import MAX_BAD_WORDS, MAX_STOP_STRINGS, MAX_STOP_TOKENS

MAX_METADATA = 16  # OpenAI's limit
MAX_LABEL_CHARACTERS = 512
MAX_TEMPLATE_KWARGS = 64
IGNORED = "Accepted and ignored"

Label = Annotated[str, Field(max_length=MAX_LABEL_CHARACTERS)]


def _check_biased_tokens(bias: dict[str, float] | None) -> dict[str, float] | None:
    for key in bias or ():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) < 2**32):
            shown = f"{key:.20}"
            raise PydanticCustomError("token_id", "the key {key} is not a token id", {"key": repr(shown)})
    return bias


def _no_logprobs(value: Any) -> Any:
    return None if value is False else value  # some clients send false for none


ModelName = Annotated[str | None, Field(description="A name of the served model, or none; the answer repeats it")]
Stream = Annotated[bool | None, Field(description="Send the answer as server-sent events while it grows")]
Priority = Annotated[Int32 | None, Field(description="Requests with a lower number are served earlier")]
User = Annotated[str | None, Field(description="Name of the end user, for logs only")]
TopK = Annotated[Annotated[Int32, Field(ge=-1)] | None, Field(description="0 and -1 keep all tokens")]
StopStrings = Annotated[
    str | list[str] | None,
    at_most(MAX_STOP_STRINGS),
    Field(description="The answer ends before the first of these strings"),
]
LogitBias = Annotated[
    dict[str, float] | None,
    at_most(MAX_LOGIT_BIASES),
    pydantic.AfterValidator(_check_biased_tokens),
    Field(description="Maps token ids (as strings) to values that are added to their logits"),
]
NumLogprobs = Annotated[
    CountOrAll | None,
    pydantic.BeforeValidator(_no_logprobs),
    Field(
        description="Give the log-probability of each token and of this many most likely tokens, "
        "up to gateway.max_logprobs; -1: of the whole vocabulary. All answers together have at most "
        "gateway.max_request_logprobs"
    ),
]
Echo = Annotated[bool | None, Field(description="Start every text with its prompt")]
TemplateKwargs = Annotated[
    dict[str, Any] | None,
    at_most(MAX_TEMPLATE_KWARGS),
    Field(description="Further variables of the chat template; at most 16384 bytes, nested at most 8 deep"),
]
Suffix = Annotated[
    str | None,
    Field(
        description="Text after the answer, which then stands between prompt and suffix; empty: none. Only for models "
        "whose tokenizer has tokens for that, and not with echo or truncate_prompt_tokens"
    ),
]


# A field for each option that is a number: `SamplingParams` says what it means, and checks it.
_NumberFields = pydantic.create_model(
    "_NumberFields",
    __base__=RequestModel,
    **{
        name: ((Int32 if isinstance(each.default, int) else float) | None, Field(None, description=each.description))
        for name, each in NUMBERS.items()
    },
)


def _check_request_id(given: str) -> str:
    if fault := fault_in(given.encode(), MAX_CHARACTERS_OF_BODY):
        raise PydanticCustomError("request_id", "{fault}", {"fault": fault})
    return given


class NamedFields(RequestModel):
    """A request that has a name, as with vLLM."""

    request_id: Annotated[str, pydantic.AfterValidator(_check_request_id)] | None = Field(
        None, description="The request's name, unless the header x-request-id gives it one"
    )
    rid: Annotated[str, pydantic.AfterValidator(_check_request_id)] | None = Field(
        None, description="SGLang's name of request_id, which wins"
    )

    def name_request(self, request: Request) -> None:
        name_by_body(request.scope, self.rid if self.request_id is None else self.request_id)

    def source_of(self, request_id: str) -> str:
        """The field or header that has given this name."""
        given: dict[str | None, str] = {self.rid: "rid", self.request_id: "request_id"}
        return given.get(request_id, REQUEST_ID_HEADER)


class IgnoredFields(RequestModel):
    """What other servers do with a request, OpenAI's own and, with the last two fields, vLLM."""

    prompt_cache_key: Label | None = Field(None, description=IGNORED)
    prompt_cache_options: dict[str, Any] | None = Field(None, description=IGNORED)
    prompt_cache_retention: Label | None = Field(None, description=IGNORED)
    safety_identifier: Label | None = Field(None, description=IGNORED)
    service_tier: Label | None = Field(None, description=IGNORED)
    session_id: Label | None = Field(None, description=f"{IGNORED}: the prefix cache is found without it")
    stream_interval: Any = Field(None, description=f"{IGNORED}: tokens are sent when they come")


class SamplingFields(_NumberFields, IgnoredFields):
    """How many answers, how their tokens are sampled, and what becomes a prompt. Null always means the default."""

    n: UInt32 | None = Field(None, description="Number of answers to each prompt")
    top_k: TopK = None
    bad_words: Annotated[list[str] | None, at_most(MAX_BAD_WORDS)] = Field(
        None, description="Words that must not appear in the answer"
    )
    allowed_token_ids: Annotated[list[UInt32] | None, at_most(MAX_ALLOWED_TOKENS)] = Field(
        None, min_length=1, description="Only these tokens are sampled, and EOS only if it is one of them"
    )
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = Field(
        None,
        description="The same seed gives the same tokens, except few that rounding may change; a negative seed is "
        "taken as its 64-bit two's complement",
    )
    stop: StopStrings = None
    stop_regex: Annotated[str | list[str] | None, at_most(MAX_STOP_STRINGS)] = Field(
        None,
        description="The answer ends with the token behind which one of these regular expressions matches anywhere in "
        "it, and keeps what has matched",
    )
    stop_token_ids: Annotated[list[Int64] | None, at_most(MAX_STOP_TOKENS)] = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = Field(None, description="SGLang's name of include_stop_str_in_output")
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = Field(
        None,
        description="Add the special tokens that the model expects around a prompt. Default: true for texts, false for "
        "chats, whose template writes them, unless it is of a model of pictures and does not begin with the first one",
    )
    truncate_prompt_tokens: CountOrAll | None = Field(
        None, description="Keep only this many of the prompt's last tokens; -1: as many as leave room for max_tokens"
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="With truncate_prompt_tokens, where tokens are left out: left, the default, or right"
    )
    priority: Priority = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="Only requests with the same salt share prompt prefixes; at most 256 characters"
    )
    user: User = None
    metadata: Annotated[dict[str, Any] | None, at_most(MAX_METADATA)] = Field(None, description=IGNORED)
    reasoning_effort: Label | None = Field(None, description=f"{IGNORED}; in chats a variable of the template")
    store: bool | None = Field(None, description=IGNORED)
    verbosity: Label | None = Field(None, description=IGNORED)

    @pydantic.field_validator("truncate_prompt_tokens")
    @classmethod
    def _check_kept_tokens(cls, count: int | None) -> int | None:
        if count == 0:
            raise PydanticCustomError("no_tokens", "must be -1 or at least 1: a prompt has a token")
        return count


class AnswerFields(RequestModel):
    """Whose answer it is, how long, and in how many pieces."""

    model: ModelName = None
    stream: Stream = None
    max_tokens: Int64 | None = Field(
        None,
        description="Maximum number of tokens to generate; lowered to the rest of the context, unless the server is "
        "strict. 0, with echo or prompt_logprobs: only compute the prompt",
    )
    timings_per_token: bool | None = Field(
        None, description="Give llama.cpp's timings: in every event of a stream, else in the answer"
    )


class BeamFields(RequestModel):
    """Answers of which the best are returned."""

    best_of: UInt32 | None = Field(None, description="Answers to generate; the n most likely ones are returned")
    use_beam_search: bool | None = Field(
        None,
        description="Search for the most likely answers with best_of (or n) beams instead of sampling; the n best ones "
        "are returned, also of a stream only at the end",
    )
    length_penalty: float | None = Field(
        None, description="With use_beam_search: divide the score of an answer by its length to the power of this"
    )
    early_stopping: bool | Literal["never"] | None = Field(
        None,
        description="With use_beam_search: true: end as soon as there are as many answers as beams; false: when better "
        'ones are unlikely; "never": when better ones are impossible',
    )

    @pydantic.model_validator(mode="after")
    def _check_beam_search(self) -> BeamFields:
        if not self.use_beam_search:
            for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) not in (None, neutral):
                    raise PydanticCustomError("beams", "has an effect only with use_beam_search", {"field": name})
        return self
