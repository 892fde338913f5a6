"""Bodies and answers of Ollama's /api/chat and /api/generate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NotRequired

import pydantic
from pydantic import Field
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from services.gateway.apis.shared.generation_fields import IGNORED
from services.gateway.apis.shared.logprobs import TokenLogprob
from services.gateway.apis.shared.parts import MAX_PARTS
from services.gateway.apis.shared.request_model import Int32, Int64, RequestModel, TokenIdList, UInt32, at_most
from services.gateway.request.read_request import MAX_MESSAGES, MAX_STOP_STRINGS
from services.gateway.text.read_chat import MAX_CALLS, MAX_NAME_CHARACTERS
from services.gateway.text.tools.tool import MAX_TOOLS

ALL = -1
RANDOM_SEED = -1


class OllamaOptions(RequestModel):
    """How tokens are sampled. Options of the machine that runs the model (`num_ctx`, `num_gpu`, ...) have no effect."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "mirostat": (0,),
        "tfs_z": (1,),
        "typical_p": (1,),
    }

    num_predict: Annotated[int, Field(ge=-2, le=2**31 - 1)] | None = Field(
        None, description="Longest answer in tokens; -1, the default, 0 and -2: to the end of the context"
    )
    temperature: float | None = Field(None, description="Default 0.8")
    top_k: Int32 | None = Field(None, description="Default 40")
    top_p: float | None = Field(None, description="Default 0.9")
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = Field(None, description="The same as repetition_penalty of completions; default 1")
    repeat_last_n: Annotated[int, Field(ge=ALL)] | None = Field(
        None, description="Tokens that penalties count: -1, the default here: all; 0: none. Else only without penalties"
    )
    seed: Int64 | None = Field(None, description="-1: a random one")
    stop: Annotated[list[str] | str | None, at_most(MAX_STOP_STRINGS)] = None

    @pydantic.model_validator(mode="after")
    def _check_penalties(self) -> OllamaOptions:
        given = (self.repeat_penalty, self.frequency_penalty, self.presence_penalty)
        has_penalties = any(value not in (None, neutral) for value, neutral in zip(given, (1, 0, 0), strict=True))
        if self.repeat_last_n not in (None, ALL, 0) and has_penalties:
            context = {"value": self.repeat_last_n, "field": "repeat_last_n"}
            message = "is {value}: with a penalty only -1 (all tokens) and 0 (no penalty) are supported"
            raise PydanticCustomError("repeat_last_n", message, context)
        return self


Images = Annotated[list[str] | None, at_most(MAX_PARTS), Field(description="Pictures in base64")]


class OllamaFields(RequestModel):
    """What both bodies have in common."""

    model: Annotated[str, Field(min_length=1)]
    stream: bool | None = Field(None, description="Send the answer in lines of JSON while it grows; the default")
    format: Literal["", "json"] | dict[str, Any] | None = Field(None, description="json: an object; or a JSON Schema")
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = Field(
        None, description="Whether, or how much, to reason: a variable of the chat template. false: show no reasoning"
    )
    logprobs: bool | None = Field(None, description="Give the log-probability of each token")
    top_logprobs: UInt32 | None = Field(None, description="With logprobs: most likely tokens to give for each token")
    keep_alive: Any = Field(None, description=IGNORED)
    shift: bool | None = Field(None, description=IGNORED)
    truncate: bool | None = Field(None, description=IGNORED)

    @property
    def is_stream(self) -> bool:
        """Whether the answer comes in lines."""
        return self.stream is not False


class OllamaGenerateRequest(OllamaFields):
    """A text to answer, or with `raw` to continue."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"template": ("",)}

    prompt: str | None = Field(None, description="Without it nothing is generated")
    system: str | None = Field(None, description="Precedes the prompt as the message of the system")
    suffix: str | None = Field(None, description="The answer stands between prompt and suffix")
    raw: bool | None = Field(None, description="Continue the prompt as it is, without the chat template")
    context: Annotated[TokenIdList | None, Field(description="Token ids that precede the prompt: of an answer")] = None
    images: Images = None

    @pydantic.model_validator(mode="after")
    def _check_combinations(self) -> OllamaGenerateRequest:
        for name in ("suffix", "context", "raw"):
            if getattr(self, name) and self.images:
                raise PydanticCustomError("images", "cannot be used with {name}", {"name": name, "field": "images"})
        if self.context and (self.suffix or self.raw):
            other = "suffix" if self.suffix else "raw"
            raise PydanticCustomError("context", "cannot be used with {other}", {"other": other, "field": "context"})
        return self


class OllamaFunction(RequestModel):
    """Which tool was called, and how."""

    name: str
    arguments: dict[str, Any] | None = None


class OllamaCall(RequestModel):
    """A call of a tool in an earlier message."""

    id: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)] | None = None
    function: OllamaFunction


class OllamaMessage(RequestModel):
    """One message of the chat."""

    role: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]
    content: str | None = None
    thinking: str | None = None
    images: Images = None
    tool_calls: Annotated[list[OllamaCall] | None, at_most(MAX_CALLS)] = None
    tool_name: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)] | None = Field(
        None, description="For the role tool: whose result it is"
    )
    tool_call_id: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)] | None = Field(
        None, description="For the role tool: the call that this message answers; default: the first without an answer"
    )


class OllamaChatRequest(OllamaFields):
    """A conversation."""

    messages: Annotated[list[OllamaMessage] | None, Field(fail_fast=True), at_most(MAX_MESSAGES)] = Field(
        None, description="Without any nothing is generated"
    )
    tools: Annotated[list[Any] | None, at_most(MAX_TOOLS)] = Field(
        None, description="The tools that the model may call, as in chat completions"
    )


class ShowRequest(RequestModel):
    """Which model to tell of."""

    model: str | None = None
    name: str | None = Field(None, description="The older name of model")


class CalledFunction(TypedDict):
    """Which tool to call, and how."""

    index: int
    name: str
    arguments: dict[str, Any]


class CallObject(TypedDict):
    """A call of a tool."""

    id: str
    function: CalledFunction


class MessageObject(TypedDict):
    """The answer, or its next piece."""

    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[CallObject]]


class OllamaAnswer(TypedDict):
    """An answer or its next piece: in `message` of a chat, else in `response`. Times are nanoseconds."""

    model: str
    created_at: str
    message: NotRequired[MessageObject]
    response: NotRequired[str]
    thinking: NotRequired[str]
    logprobs: NotRequired[list[TokenLogprob]]
    done: bool
    done_reason: NotRequired[str]
    context: NotRequired[list[int]]  # prompt and answer as token ids, of /api/generate without raw
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]  # until the first step
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


class ModelDetails(TypedDict):
    """What kind of model it is."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ListedModel(TypedDict):
    """A model under one of its names."""

    name: str
    model: str
    modified_at: str
    size: int  # bytes
    digest: str
    details: ModelDetails


class RunningModel(ListedModel):
    """A model in memory, which all served ones are."""

    expires_at: str
    size_vram: int
    context_length: int


class ListedModels(TypedDict):
    """The served model under its names, and adapters."""

    models: list[ListedModel]


class RunningModels(TypedDict):
    """The same, as they are in memory."""

    models: list[RunningModel]


class ShownModel(TypedDict):
    """What there is to know of a model."""

    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(TypedDict):
    """The server's version."""

    version: str
