"""The body of SGLang's POST /generate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NotRequired

import pydantic
from pydantic import Discriminator, Field, Tag
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from services.common.config import MAX_PROMPTS
from services.common.sampling_params import MAX_LOGPROB_TOKENS, MAX_PRIORITY
from services.gateway.apis.shared.feature_fields import FeatureFields, ReportObjects, asked_reports
from services.gateway.apis.shared.generation_fields import BeamFields, Echo, LogitBias, SamplingFields, Suffix
from services.gateway.apis.shared.other_servers import LLAMA_CPP_OPTIONS, OF_CHATS, UNSUPPORTED
from services.gateway.apis.shared.prompts import Prompt, prompt_list
from services.gateway.apis.shared.request_model import CountOrAll, Int32, Int64, RequestModel, UInt32, at_most
from services.gateway.apis.shared.structured_output import StructuredOutputFields

DEFAULT_TOKENS = 128  # SGLang's default of max_new_tokens


def _kind_of_named(value: Any) -> str:
    is_nested = isinstance(value, list) and bool(value) and (value[0] is None or isinstance(value[0], list))
    return "<lists>" if is_nested else "<token_ids>"


def _of_all_or_each(kind: Any) -> Any:
    """A value for all prompts, or a list of one for each."""
    return Annotated[
        Annotated[kind, Tag("<all>")]
        | Annotated[list[kind], Field(fail_fast=True), at_most(MAX_PROMPTS), Tag("<each>")],
        Discriminator(lambda value: "<each>" if isinstance(value, list) else "<all>"),
    ]


Priority = Annotated[
    Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None,
    Field(description="Requests with a higher number are served earlier, as with SGLang"),
]
_Named = Annotated[list[Int64], at_most(MAX_LOGPROB_TOKENS)]
NamedTokens = Annotated[
    Annotated[_Named, Tag("<token_ids>")]
    | Annotated[list[_Named | None], at_most(MAX_PROMPTS), Tag("<lists>")],
    Discriminator(_kind_of_named),
]


# Fields that may be a list of a value for each prompt; `token_ids_logprob` if it is one of lists.
OF_EACH_PROMPT = (
    "sampling_params", "return_logprob", "top_logprobs_num", "token_ids_logprob", "logprob_start_len",
    "return_hidden_states", "lora_path", "cache_salt", "extra_key",
)  # fmt: skip


class GenerateSampling(SamplingFields, BeamFields, StructuredOutputFields):
    """SGLang's `sampling_params`: the options of completions, some of them under other names."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **UNSUPPORTED,
        **LLAMA_CPP_OPTIONS,
        **OF_CHATS,
        "return_progress": (False,),
        # they belong into the body, or are known under another name
        "n_predict": (-1,),
        "logprob_token_ids": ([],),
        "logprobs": (),
        "max_tokens": (),
        "prompt": (),
        "stream": (),
        "stream_options": (),
    }

    logit_bias: LogitBias = None
    suffix: Suffix = None
    echo: Echo = None
    max_new_tokens: UInt32 | None = Field(
        None, description=f"Longest answer in tokens; default {DEFAULT_TOKENS}. 0: compute the prompt"
    )
    min_new_tokens: UInt32 | None = Field(None, description="Shortest answer in tokens")
    sampling_seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    priority: Priority = None

    @property
    def hides_prompt(self) -> bool:
        """Whether the prompt is only computed, as SGLang's own clients ask for before they continue it."""
        return self.max_new_tokens == 0 and not self.echo


SessionName = Annotated[str, Field(min_length=1, max_length=512)]


class SessionParams(RequestModel):
    """What precedes a request of a session."""

    id: SessionName = Field(description="What /open_session has answered")
    rid: SessionName | None = Field(
        None, description="The request of the session whose prompt and answer precede this one's prompt; null: none"
    )
    offset: Int32 | None = Field(
        None, description="Keep only so many tokens of them, or all but so many if it is negative; 0, the default: all"
    )
    replace: bool | None = Field(None, description="Forget the requests that follow that one, or with none all")
    drop_previous_output: bool | None = Field(None, description="Leave out its answer")


class OpenSessionBody(RequestModel):
    """A new session."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"streaming": (False,), "timeout": ()}

    session_id: SessionName | None = Field(None, description="Its id; default: a random one")
    capacity_of_str_len: Int64 | None = Field(None, description="Accepted and ignored, as SGLang does")


class CloseSessionBody(RequestModel):
    """A session to forget."""

    session_id: SessionName


class GenerateBody(FeatureFields):
    """Prompts to continue. With several prompts or answers, the response is a list."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "image_data": ([],),
        "audio_data": ([],),
        "video_data": ([],),
        "input_embeds": (),
        "positional_embed_overrides": (),
        "custom_logit_processor": ("",),
        "lora_id": ("",),
        "max_thinking_tokens": (),
        "multi_item_delimiter_indices": ([],),
        "require_reasoning": (False,),
        # what the answer would have in addition, or in another form
        "return_bytes": (False,),
        "return_entropy": (False,),
        "return_flat_raw_top_logprobs": (False,),
        "return_flat_raw_top_logprobs_b64": (False,),
        "return_indexer_topk": (False,),
        "return_routed_experts": (False,),
        "return_sampling_mask": (False,),
        "parameters": (),  # of TGI's route of this name
    }

    text: Annotated[str | list[str] | None, at_most(MAX_PROMPTS)] = Field(None, description="The prompt, or several")
    input_ids: Prompt | None = Field(None, description="The same as token ids")
    sampling_params: _of_all_or_each(GenerateSampling) = Field(  # type: ignore[valid-type]
        default_factory=lambda: GenerateSampling(), description="Of all prompts, or a list: of each"
    )
    stream: bool | None = Field(None, description="Send events, each with the whole text so far")
    return_logprob: _of_all_or_each(bool | None) = Field(  # type: ignore[valid-type]
        None, description="Give the log-probability of each token; this and what follows may be a list: of each prompt"
    )
    top_logprobs_num: _of_all_or_each(UInt32 | None) = Field(  # type: ignore[valid-type]
        None, description="And of this many most likely tokens"
    )
    token_ids_logprob: NamedTokens | None = Field(
        None,
        description="With return_logprob: give the log-probabilities of these tokens at each position; for several "
        "prompts also a list for each",
    )
    logprob_start_len: _of_all_or_each(CountOrAll | None) = Field(  # type: ignore[valid-type]
        None, description="Give the log-probabilities of the prompt's tokens from this one on; -1, the default: of none"
    )
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = Field(None, description="Give the prompt's token ids; not of a stream")
    return_hidden_states: _of_all_or_each(bool | None) = Field(  # type: ignore[valid-type]
        None, description="Give the last hidden state of each token but the last one of the answer; not of a stream"
    )
    rid: _of_all_or_each(str | None) = Field(  # type: ignore[valid-type]
        None, description="The request's name, for logs and meta_info.id; empty: none"
    )
    lora_path: _of_all_or_each(str | None) = Field(  # type: ignore[valid-type]
        None, description="The name of an adapter"
    )
    session_params: SessionParams | None = Field(None, description="What precedes the prompt, of a session")
    priority: Priority = None
    cache_salt: _of_all_or_each(str | None) = Field(  # type: ignore[valid-type]
        None, description="Only requests with the same salt share prompt prefixes"
    )
    extra_key: _of_all_or_each(str | None) = Field(  # type: ignore[valid-type]
        None, description="A second part of cache_salt"
    )

    @pydantic.field_validator("sampling_params", mode="before")
    @classmethod
    def _no_params(cls, value: Any) -> Any:
        return {} if value is None else value

    @pydantic.model_validator(mode="before")
    @classmethod
    def _check_prompt_names(cls, body: Any) -> Any:
        if isinstance(body, dict) and body.get("inputs") is not None:
            message = "{field} is Text Generation Inference's name of the prompt, it cannot be used with {other}"
            other = next(name for name in ("text", "input_ids") if body.get(name) is not None)
            raise PydanticCustomError("prompts", message, {"field": "inputs", "other": other})
        return body

    @pydantic.model_validator(mode="after")
    def _check_together(self) -> GenerateBody:
        if (self.text is None) == (self.input_ids is None):
            raise PydanticCustomError("prompt", "exactly one of text and input_ids is required", {"field": "text"})
        if isinstance(self.input_ids, str) or (self.input_ids and isinstance(self.input_ids[0], str)):
            raise PydanticCustomError("ids", "must be token ids, or lists of them", {"field": "input_ids"})
        self._check_lists()
        for each in self.each:
            each._check_options()
        if len({each.sampling_params.n or 1 for each in self.each}) > 1:
            context = {"field": "sampling_params"}
            raise PydanticCustomError("n", "n must be the same for all prompts", context)
        has_one = not self.is_batch and [each.sampling_params.n or 1 for each in self.each] == [1]
        if self.session_params is not None and not has_one:
            raise PydanticCustomError("session", "is for one prompt with one answer", {"field": "session_params"})
        return self

    @pydantic.field_validator("session_params", mode="before")
    @classmethod
    def _no_session(cls, value: Any) -> Any:
        return None if value == {} else value

    def _check_lists(self) -> None:
        """Options for each of several prompts are as many as these."""
        num_prompts = len(self.prompts)
        for field in (*OF_EACH_PROMPT, "rid"):
            given = getattr(self, field)
            if field == "token_ids_logprob" and _kind_of_named(given) == "<token_ids>":
                continue
            if isinstance(given, list) and (not self.is_batch or len(given) != num_prompts):
                context = {"count": len(given), "prompts": num_prompts, "field": field}
                if field == "token_ids_logprob" and num_prompts == 1:
                    raise PydanticCustomError("each", "must be a flat list of integers", context)
                if not self.is_batch:
                    raise PydanticCustomError("each", "is a list, which is for a list of prompts", context)
                raise PydanticCustomError("each", "has {count} elements for {prompts} prompts", context)

    def _check_options(self) -> None:
        """Of one prompt."""
        if self.token_ids_logprob:
            if not self.return_logprob:
                context: dict[str, Any] = {"field": "token_ids_logprob"}
                raise PydanticCustomError("named", "has an effect only with return_logprob", context)
            if (wrong := next((i for i in self.token_ids_logprob if not 0 <= i < 2**32), None)) is not None:
                context = {"token_id": wrong, "field": "token_ids_logprob"}
                raise PydanticCustomError("named", "has the out-of-vocabulary token {token_id}", context)
        asked = [*asked_reports(self), *(["return_prompt_token_ids"] if self.return_prompt_token_ids else [])]
        for field in asked:
            if self.stream:
                raise PydanticCustomError("stream", "cannot be used with stream", {"field": field})

    @property
    def each(self) -> list[GenerateBody]:
        """The body of each prompt alone: one object for all if nothing is given for each."""
        lists = {name: given for name in OF_EACH_PROMPT if isinstance(given := getattr(self, name), list)}
        if _kind_of_named(self.token_ids_logprob) == "<token_ids>":
            lists.pop("token_ids_logprob", None)
        num_prompts = len(self.prompts)
        if not lists:
            return [self] * num_prompts
        options = zip(*lists.values(), strict=True)
        return [self.model_copy(update=dict(zip(lists, values, strict=True))) for values in options]

    @property
    def shows_prompt_logprobs(self) -> bool:
        """Whether the answer to this one prompt has log-probabilities of its tokens."""
        return bool(self.return_logprob) and self.logprob_start_len not in (None, -1)

    def name_of(self, prompt_index: int, default: str) -> str:
        """The name of the request of one of the prompts; `default`: of all together."""
        if isinstance(self.rid, list) and self.rid[prompt_index]:
            return self.rid[prompt_index]
        return f"{default}-{prompt_index}" if len(self.prompts) > 1 else default

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """All prompts, one element each."""
        return prompt_list(self.text if self.input_ids is None else self.input_ids)

    @property
    def is_batch(self) -> bool:
        """Whether several prompts are given, be it a list of one."""
        prompt = self.text if self.input_ids is None else self.input_ids
        return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)


# Log-probability (None: of the first token of a prompt), token id, and the token's text if asked for.
LogprobTriple = tuple[float | None, int, str | None]


class FinishObject(TypedDict):
    """Why an answer ended."""

    type: Literal["stop", "length", "abort"]
    matched: NotRequired[int | str | None]  # of "stop": the token or string
    length: NotRequired[int]  # of "length": tokens of the answer
    message: NotRequired[str]  # of "abort"


class MetaInfo(ReportObjects):
    """What is known of an answer. Reports that were asked for are in the whole answer; null: it was aborted before."""

    id: str
    finish_reason: FinishObject | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: NotRequired[int]  # once the answer is whole
    e2e_latency: NotRequired[float]  # seconds
    weight_version: NotRequired[str]  # hash of the weights
    output_token_logprobs: NotRequired[list[LogprobTriple]]
    output_top_logprobs: NotRequired[list[list[LogprobTriple] | None]]
    input_token_logprobs: NotRequired[list[LogprobTriple]]
    input_top_logprobs: NotRequired[list[list[LogprobTriple] | None]]
    output_token_ids_logprobs: NotRequired[list[list[LogprobTriple] | None]]
    input_token_ids_logprobs: NotRequired[list[list[LogprobTriple] | None]]


class GenerateObject(TypedDict):
    """An answer, or one event of a streamed one: all of its text so far."""

    text: str
    output_ids: list[int]
    prompt_token_ids: NotRequired[list[int]]
    meta_info: MetaInfo
    index: NotRequired[int]  # of events where there are several answers


class AbortBody(RequestModel):
    """Which of the caller's requests end."""

    rid: str | None = Field(None, description="The name of the request")
    abort_all: bool | None = Field(None, description="End all of the caller's requests")

    @pydantic.model_validator(mode="after")
    def _check_which(self) -> AbortBody:
        if not self.abort_all and not self.rid:
            raise PydanticCustomError("rid", "is required, or abort_all", {"field": "rid"})
        return self


class ModelDetails(TypedDict):
    """The served model."""

    model_path: str
    tokenizer_path: str
    is_generation: bool
    has_image_understanding: bool
    has_audio_understanding: bool
    weight_version: str


class WeightVersion(TypedDict):
    """Which weights are served."""

    weight_version: str


class LoadDetails(TypedDict):
    """Sequences at the dense worker, and the tokens that have room in the KV cache."""

    dp_rank: int
    num_reqs: int  # those that wait included
    num_waiting_reqs: int
    num_tokens: int


class ServerDetails(TypedDict):
    """Version, limits and load."""

    version: str
    model_path: str
    tokenizer_path: str
    served_model_name: str
    status: Literal["ready", "starting"]
    context_length: int
    max_running_requests: int
    max_req_input_len: int  # tokens
    max_total_num_tokens: int | None  # that the KV cache has room for; null: the attention worker does not answer
    page_size: int | None  # tokens of a block
    num_open_requests: int  # those that wait included
    internal_states: list[dict[str, int]]  # of all replicas together: open requests
