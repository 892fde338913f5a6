"""The body of SGLang's POST /generate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NotRequired

import pydantic
from pydantic import Discriminator, Field, Tag
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from services.common.config import MAX_PROMPTS
from services.common.sampling_params import MAX_LOGPROB_TOKENS
from services.gateway.apis.shared.feature_fields import FeatureFields, ReportObjects, asked_reports
from services.gateway.apis.shared.generation_fields import BeamFields, Echo, LogitBias, Priority, SamplingFields, Suffix
from services.gateway.apis.shared.other_servers import LLAMA_CPP_OPTIONS, OF_CHATS, UNSUPPORTED
from services.gateway.apis.shared.prompts import Prompt, prompt_list
from services.gateway.apis.shared.request_model import CountOrAll, Int64, RequestModel, UInt32, at_most
from services.gateway.apis.shared.structured_output import StructuredOutputFields

DEFAULT_TOKENS = 128  # SGLang's default of max_new_tokens


def _kind_of_named(value: Any) -> str:
    is_nested = isinstance(value, list) and bool(value) and (value[0] is None or isinstance(value[0], list))
    return "<lists>" if is_nested else "<token_ids>"


_Named = Annotated[list[Int64], at_most(MAX_LOGPROB_TOKENS)]
SeveralNames = Annotated[str | list[str] | None, at_most(MAX_PROMPTS)]
NamedTokens = Annotated[
    Annotated[_Named, Tag("<token_ids>")]
    | Annotated[list[_Named | None], at_most(MAX_PROMPTS), Tag("<lists>")],
    Discriminator(_kind_of_named),
]


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

    @property
    def hides_prompt(self) -> bool:
        """Whether the prompt is only computed, as SGLang's own clients ask for before they continue it."""
        return self.max_new_tokens == 0 and not self.echo


class GenerateBody(FeatureFields):
    """Prompts to continue. With several prompts or answers, the response is a list."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "image_data": ([],),
        "audio_data": ([],),
        "video_data": ([],),
        "input_embeds": (),
        "positional_embed_overrides": (),
        "session_params": ({},),
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
    sampling_params: Annotated[
        Annotated[GenerateSampling, Tag("<all>")]
        | Annotated[list[GenerateSampling], Field(fail_fast=True), at_most(MAX_PROMPTS), Tag("<each>")],
        Discriminator(lambda value: "<each>" if isinstance(value, list) else "<all>"),
    ] = Field(default_factory=lambda: GenerateSampling(), description="Of all prompts, or a list: of each")
    stream: bool | None = Field(None, description="Send events, each with the whole text so far")
    return_logprob: bool | None = Field(None, description="Give the log-probability of each token")
    top_logprobs_num: UInt32 | None = Field(None, description="And of this many most likely tokens")
    token_ids_logprob: NamedTokens | None = Field(
        None,
        description="With return_logprob: give the log-probabilities of these tokens at each position; for several "
        "prompts also a list for each",
    )
    logprob_start_len: CountOrAll | None = Field(
        None, description="Give the log-probabilities of the prompt's tokens from this one on; -1, the default: of none"
    )
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = Field(None, description="Give the prompt's token ids; not of a stream")
    rid: SeveralNames = Field(None, description="The request's name, for logs and meta_info.id; or of each prompt's")
    lora_path: Annotated[str | list[str | None] | None, at_most(MAX_PROMPTS)] = Field(
        None, description="The name of an adapter; or of one for each prompt, null: none"
    )
    priority: Priority = None
    cache_salt: str | None = Field(None, description="Only requests with the same salt share prompt prefixes")
    extra_key: str | None = Field(None, description="A second part of cache_salt")

    @pydantic.field_validator("sampling_params", mode="before")
    @classmethod
    def _no_params(cls, value: Any) -> Any:
        return {} if value is None else value

    @pydantic.model_validator(mode="before")
    @classmethod
    def _take_lists(cls, body: Any) -> Any:
        """Some options may be given for each prompt, too, if they are the same for all. `inputs` are no prompts."""
        if not isinstance(body, dict):
            return body
        if body.get("inputs") is not None:
            message = "{field} is Text Generation Inference's name of the prompt, it cannot be used with {other}"
            other = next(name for name in ("text", "input_ids") if body.get(name) is not None)
            raise PydanticCustomError("prompts", message, {"field": "inputs", "other": other})
        prompts = body.get("text") if body.get("input_ids") is None else body["input_ids"]
        num_prompts = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
        for field in ("return_logprob", "top_logprobs_num", "logprob_start_len"):
            if isinstance(given := body.get(field), list) and given:
                if not isinstance(prompts, list) or len(given) != num_prompts:
                    context = {"count": len(given), "prompts": num_prompts, "field": field}
                    raise PydanticCustomError("each", "has {count} elements for {prompts} prompts", context)
                if any(each != given[0] for each in given):
                    raise PydanticCustomError("same", "must be the same for all prompts", {"field": field})
                body = {**body, field: given[0]}
        return body

    @pydantic.model_validator(mode="after")
    def _check_together(self) -> GenerateBody:
        if (self.text is None) == (self.input_ids is None):
            raise PydanticCustomError("prompt", "exactly one of text and input_ids is required", {"field": "text"})
        if isinstance(self.input_ids, str) or (self.input_ids and isinstance(self.input_ids[0], str)):
            raise PydanticCustomError("ids", "must be token ids, or lists of them", {"field": "input_ids"})
        if self.token_ids_logprob:
            self._check_named_tokens(self.token_ids_logprob)
        asked = [*asked_reports(self), *(["return_prompt_token_ids"] if self.return_prompt_token_ids else [])]
        for field in asked:
            if self.stream:
                raise PydanticCustomError("stream", "cannot be used with stream", {"field": field})
        self._check_lists()
        return self

    def _check_lists(self) -> None:
        """Options for each of several prompts are as many as these."""
        num_prompts = len(self.prompts)
        for field in ("sampling_params", "rid", "lora_path"):
            given = getattr(self, field)
            if isinstance(given, list) and (not self.is_batch or len(given) != num_prompts):
                context = {"count": len(given), "prompts": num_prompts, "field": field}
                raise PydanticCustomError("each", "has {count} elements for {prompts} prompts", context)
        if len({each.n or 1 for each in self.each_sampling}) > 1:
            context = {"field": "sampling_params"}
            raise PydanticCustomError("n", "n must be the same for all prompts", context)

    @property
    def shows_prompt_logprobs(self) -> bool:
        """Whether the answer has log-probabilities of the prompt's tokens."""
        return bool(self.return_logprob) and self.logprob_start_len not in (None, -1)

    @property
    def each_sampling(self) -> list[GenerateSampling]:
        """The options of each prompt."""
        given = self.sampling_params
        return given if isinstance(given, list) else [given] * len(self.prompts)

    @property
    def num_answers(self) -> int:
        """The answers to each prompt."""
        return next((each.n or 1 for each in self.each_sampling), 1)

    def name_of(self, prompt_index: int, default: str) -> str:
        """The name of the request of one of the prompts; `default`: of all together."""
        if isinstance(self.rid, list):
            return self.rid[prompt_index]
        name = self.rid or default
        return f"{name}-{prompt_index}" if len(self.prompts) > 1 else name

    def adapter_of(self, prompt_index: int) -> str | None:
        """The adapter for one of the prompts."""
        return self.lora_path[prompt_index] if isinstance(self.lora_path, list) else self.lora_path

    def _check_named_tokens(self, given: list[int] | list[list[int] | None]) -> None:
        prompt = self.text if self.input_ids is None else self.input_ids
        num_prompts = len(prompt) if self.is_batch else 1
        if not self.return_logprob:
            raise PydanticCustomError("named", "has an effect only with return_logprob", {"field": "token_ids_logprob"})
        if not isinstance(given[0], int) and (not self.is_batch or len(given) != num_prompts):
            context = {"count": len(given), "prompts": num_prompts, "field": "token_ids_logprob"}
            is_flat = "must be a flat list of integers"
            raise PydanticCustomError(
                "named", is_flat if num_prompts == 1 else "has {count} lists for {prompts} prompts", context
            )
        lists = [given] if isinstance(given[0], int) else given
        if (wrong := next((i for each in lists for i in each or () if not 0 <= i < 2**32), None)) is not None:
            context = {"token_id": wrong, "field": "token_ids_logprob"}
            raise PydanticCustomError("named", "has the out-of-vocabulary token {token_id}", context)

    def named_tokens(self, prompt_index: int) -> list[int]:
        """The tokens of `token_ids_logprob` for one of the prompts."""
        given = self.token_ids_logprob
        if not given or isinstance(given[0], int):
            return given or []  # type: ignore[return-value]
        return given[prompt_index] or []  # type: ignore[return-value]

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
