"""The body and the answers of llama.cpp's POST /completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NotRequired

import pydantic
from pydantic import Field
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from services.common.config import MAX_PROMPTS
from services.common.sampling_params import MAX_LOGIT_BIAS, MAX_LOGIT_BIASES
from services.gateway.apis.llama_cpp.adapters import AdapterScales
from services.gateway.apis.shared.generation_fields import (
    AnswerFields,
    NumLogprobs,
    SamplingFields,
    Suffix,
)
from services.gateway.apis.shared.other_servers import OF_CHATS, UNSUPPORTED
from services.gateway.apis.shared.prompts import MAX_TEXTS, MediaPrompt, prompt_list, prompts_with_media
from services.gateway.apis.shared.request_model import (
    CountOrAll,
    Int32,
    UInt32,
    at_most,
)
from services.gateway.apis.shared.structured_output import StructuredOutputFields
from services.gateway.apis.shared.timings import ProgressObject, TimingsObject
from services.gateway.request.read_request import MAX_STRING_CHARACTERS

DEFAULTS: Mapping[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}  # as with llama.cpp
# By llama.cpp's names, in the order in which they are applied: what each is without effect.
SAMPLERS: Mapping[str, Mapping[str, Any]] = {
    "penalties": {"repetition_penalty": None, "frequency_penalty": None, "presence_penalty": None},
    "temperature": {"temperature": 1.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
}
REFUSED_SAMPLERS = frozenset({"dry", "top_n_sigma", "typ_p", "xtc", "infill", "adaptive_p"})  # by their own options
SAMPLER_LETTERS: Mapping[str, str] = {
    "e": "penalties", "t": "temperature", "k": "top_k", "p": "top_p", "m": "min_p",
    "d": "dry", "s": "top_n_sigma", "y": "typ_p", "x": "xtc", "i": "infill", "a": "adaptive_p",
}
MAX_SAMPLERS = 64
RANDOM_SEEDS = (-1, 2**32 - 1)  # llama.cpp's names of a random seed
ALL = -1
MAX_RESPONSE_FIELDS = 64
MAX_EXTRAS = 256


Bias = float | Literal[False]
Biases = Annotated[
    list[Annotated[list[UInt32 | str | float | Literal[False]], Field(min_length=2, max_length=2)]] | dict[str, Bias],
    at_most(MAX_LOGIT_BIASES),
]


class LlamaCppBody(SamplingFields, AnswerFields, StructuredOutputFields):
    """Prompts to continue, and llama.cpp's options; those of completions that have no other name here work too."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **{name: neutral for name, neutral in UNSUPPORTED.items() if name != "lora"},
        **OF_CHATS,
        "adaptive_target": (-1,),
        "grammar_lazy": (False,),
        "grammar_triggers": ([],),
        "image_data": ([],),
        "min_keep": (0, 1),  # a token is always kept
        "n_indent": (0,),
        "system_prompt": ("",),
        "t_max_predict_ms": (0,),
        "tfs_z": (1,),
        # fields of completions whose results the answer has no place for
        "best_of": (1,),
        "early_stopping": (False,),
        "echo": (False,),
        "length_penalty": (1,),
        "logprob_token_ids": ([],),
        "prompt_embeds": (),
        "prompt_logprobs": (),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "stream_options": (),
        "use_beam_search": (False,),
    }

    prompt: prompts_with_media(MAX_PROMPTS) = Field(  # type: ignore[valid-type]
        description="A text, token ids, texts between token ids, a text with pictures, or a list of such prompts. A "
        "list of texts is several prompts"
    )
    n_predict: CountOrAll | None = Field(
        None, description="Longest answer in tokens; -1, the default: to the end of the context. 0: compute the prompt"
    )
    n_cmpl: UInt32 | None = Field(None, description="Number of answers to each prompt; n is another name")
    n_probs: UInt32 | None = Field(
        None, description="Give the log-probability of each token and of this many most likely tokens; 0: none"
    )
    post_sampling_probs: bool | None = Field(
        None,
        description="With n_probs: give probabilities of what tokens were sampled from, behind all samplers, in place "
        "of the model's log-probabilities",
    )
    top_k: Annotated[Int32 | None, pydantic.AfterValidator(lambda top_k: top_k and max(top_k, -1))] = Field(
        None, description="0 and less keep all tokens"
    )
    repeat_penalty: float | None = Field(None, description="The same as repetition_penalty of completions")
    samplers: Annotated[str | list[str] | None, at_most(MAX_SAMPLERS)] = Field(
        None,
        description="Names of samplers, or their letters: the others have no effect. They are applied in this order, "
        f"whatever the list's is: {', '.join(SAMPLERS)}",
    )
    repeat_last_n: CountOrAll | None = Field(
        None, description="Tokens that penalties count: -1, the default: all; 0: none. Else only without penalties"
    )
    suffix: Suffix = None
    logprobs: NumLogprobs = None
    logit_bias: Biases | None = Field(
        None,
        description="Pairs, or an object, of a token id or text and a value that is added to the logit of the token, "
        "or of all tokens of the text; false: never sample it",
    )
    lora: AdapterScales | None = Field(
        None, description="The adapter that is applied, by its number in /lora-adapters: with scale 1, others with 0"
    )
    cache_prompt: bool | None = Field(None, description="false: compute the prompt without the prefix cache")
    return_progress: bool | None = Field(
        None, description="Send events with prompt_progress while the prompt of a stream is computed"
    )
    return_tokens: bool | None = Field(None, description="Give the token ids of the answer; streams always do")
    response_fields: Annotated[list[str] | None, at_most(MAX_RESPONSE_FIELDS)] = Field(
        None, description="Give only these fields; a/b gives the field b of a under the name a/b"
    )

    @pydantic.field_validator("samplers")
    @classmethod
    def _check_samplers(cls, given: str | list[str] | None) -> list[str] | None:
        if isinstance(given, str):
            given = [SAMPLER_LETTERS.get(letter, letter) for letter in given]
        for name in given or ():
            if name not in SAMPLERS and name not in REFUSED_SAMPLERS:
                raise PydanticCustomError("sampler", "there is no sampler {name}", {"name": repr(name[:60])})
        return given

    @pydantic.field_validator("logit_bias")
    @classmethod
    def _check_token_ids(cls, bias: Any) -> Any:
        texts = 0
        for token, value in bias.items() if isinstance(bias, dict) else bias or ():
            if isinstance(token, bool | float) or isinstance(value, str):
                raise PydanticCustomError("pair", "a pair is a token id or a text, and a number or false")
            if abs(value) > MAX_LOGIT_BIAS:
                context = {"value": f"{value:g}", "most": f"{MAX_LOGIT_BIAS:g}"}
                raise PydanticCustomError("bias", "has {value}, must be from -{most} to {most}", context)
            texts += isinstance(token, str) and not is_token_id(token)
            if isinstance(token, str) and not 1 <= len(token) <= MAX_STRING_CHARACTERS:
                context = {"count": len(token), "most": MAX_STRING_CHARACTERS}
                raise PydanticCustomError("text", "a text has {count} characters, must have 1 to {most}", context)
        if texts > MAX_TEXTS:
            context = {"count": texts, "most": MAX_TEXTS}
            raise PydanticCustomError("texts", "has {count} texts, at most {most} allowed", context)
        return bias

    @pydantic.model_validator(mode="after")
    def _check_penalties(self) -> LlamaCppBody:
        if self.repeat_last_n not in (None, ALL, 0) and self.has_penalties:
            context = {"value": self.repeat_last_n, "field": "repeat_last_n"}
            message = "is {value}: with a penalty only -1 (all tokens) and 0 (no penalty) are supported"
            raise PydanticCustomError("repeat_last_n", message, context)
        return self

    @property
    def applied_samplers(self) -> list[str]:
        """The names of the samplers that are applied, in this order."""
        return [name for name in SAMPLERS if self.samplers is None or name in self.samplers]

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty is asked for."""
        if "penalties" not in self.applied_samplers:
            return False
        penalties = (self.repeat_penalty, self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return any(value not in (None, neutral) for value, neutral in zip(penalties, (1, 1, 0, 0), strict=True))

    @property
    def max_new_tokens(self) -> int | None:
        """Longest answer in tokens; None: as long as the context allows."""
        given = self.max_tokens if self.n_predict is None else self.n_predict
        return None if given == ALL else given

    @property
    def prompts_given(self) -> list[str | list[str | int] | MediaPrompt]:
        """All prompts, one element each."""
        return prompt_list(self.prompt) or [[]]

    @property
    def biases(self) -> list[tuple[int | str, float | None]]:
        """The tokens, or texts, of `logit_bias` and what is added to their logits; None: they are never sampled."""
        given = self.logit_bias
        pairs = given.items() if isinstance(given, dict) else given or ()
        is_object = isinstance(given, dict)
        return [
            (int(token) if is_object and is_token_id(token) else token, None if value is False else float(value))
            for token, value in pairs
        ]

    @property
    def resolved(self) -> LlamaCppBody:
        """The same request with llama.cpp's defaults, under the names that all dialects share."""
        max_tokens, given = self.max_new_tokens, self.logprobs if self.n_probs is None else self.n_probs
        changes: dict[str, Any] = {
            **{name: value for name, value in DEFAULTS.items() if getattr(self, name) is None},
            "n": self.n if self.n_cmpl is None else self.n_cmpl,
            "max_tokens": max_tokens,
            "logprobs": None if max_tokens == 0 else given or None,
            "repetition_penalty": self.repetition_penalty if self.repeat_penalty is None else self.repeat_penalty,
            "seed": None if self.seed in RANDOM_SEEDS else self.seed,
            "stop": [each for each in ([self.stop] if isinstance(self.stop, str) else self.stop or ()) if each],
        }
        if self.temperature is not None:
            changes["temperature"] = max(0.0, self.temperature)  # a negative one is greedy
        if self.repeat_last_n == 0:
            changes |= SAMPLERS["penalties"]
        for name, neutral in SAMPLERS.items():
            if self.samplers is not None and name not in self.samplers:
                changes |= neutral
        return self.model_copy(update=changes)


class InfillExtra(pydantic.BaseModel):
    """A part of another file."""

    text: str
    filename: str = "tmp"


class InfillBody(LlamaCppBody):
    """Two texts, and what stands between them so far; llama.cpp's options."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **LlamaCppBody.unsupported,
        "suffix": ("",),
    }

    prompt: str | None = Field(None, description="The beginning of the middle, which the answer continues")  # type: ignore[assignment]
    input_prefix: str = Field(description="The text before the answer")
    input_suffix: str = Field(description="The text after the answer")
    input_extra: Annotated[list[InfillExtra], at_most(MAX_EXTRAS)] | None = Field(
        None, description="Parts of other files. Of their tokens the last ones are kept for which there is room"
    )

    @property
    def prompts_given(self) -> list[str | list[str | int] | MediaPrompt]:
        return [self.input_prefix]


def is_token_id(text: str) -> bool:
    """Whether a key of an object names a token by its id."""
    return text.isascii() and text.isdecimal() and len(text) <= 10


class TokenProbability(TypedDict):
    """A token of the answer, or one of the most likely tokens in its place. `token` lacks incomplete characters."""

    id: int
    token: str
    bytes: list[int]
    logprob: NotRequired[float]
    prob: NotRequired[float]  # with post_sampling_probs, in place of logprob
    top_logprobs: NotRequired[list[dict[str, Any]]]  # of tokens of the answer
    top_probs: NotRequired[list[dict[str, Any]]]  # with post_sampling_probs, in place of top_logprobs


class LlamaCppObject(TypedDict):
    """An answer, or one event of a streamed one; only the last event has all fields."""

    index: NotRequired[int]
    content: NotRequired[str]
    tokens: NotRequired[list[int]]
    id_slot: NotRequired[int]  # always -1: there are no slots
    stop: NotRequired[bool]
    model: NotRequired[str]
    tokens_predicted: NotRequired[int]
    tokens_evaluated: NotRequired[int]  # of the prompt
    tokens_cached: NotRequired[int]  # of the prompt, found in the prefix cache
    generation_settings: NotRequired[dict[str, Any]]
    prompt: NotRequired[str]
    has_new_line: NotRequired[bool]
    truncated: NotRequired[bool]  # whether the context was full
    stop_type: NotRequired[Literal["none", "eos", "limit", "word"]]  # none: the request was aborted
    stopping_word: NotRequired[str]
    timings: NotRequired[TimingsObject]
    prompt_progress: NotRequired[ProgressObject]  # in events without text
    completion_probabilities: NotRequired[list[TokenProbability]]


class DefaultSettings(TypedDict):
    """The context in tokens, and the options of /completion with their defaults."""

    n_ctx: int
    params: dict[str, Any]


class Props(TypedDict):
    """The properties of the server."""

    default_generation_settings: DefaultSettings
    total_slots: int  # sequences that run at once
    model_alias: str
    model_path: str
    media_marker: str  # in `prompt_string`, for each picture of `multimodal_data`
    modalities: dict[str, bool]
    chat_template: str  # empty: the model has none
    chat_template_tool_use: NotRequired[str]  # of a model that has one of its own for chats with tools
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool


class Slot(TypedDict, total=False):
    """A place for a sequence. The last three fields are those of sequences of the caller."""

    id: int
    id_task: int  # -1: it is free
    n_ctx: int
    speculative: bool
    is_processing: bool
    params: dict[str, Any]
    n_prompt_tokens: int
    next_token: dict[str, int | bool]
