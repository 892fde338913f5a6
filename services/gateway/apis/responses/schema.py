"""POST /v1/responses, as in OpenAI's reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field
from pydantic_core import PydanticCustomError

from services.gateway.apis.responses.items import Input
from services.gateway.apis.responses.tool_schema import ToolChoice, ToolObjects
from services.gateway.apis.shared.generation_fields import (
    IGNORED,
    MAX_METADATA,
    IgnoredFields,
    Label,
    LogitBias,
    ModelName,
    NamedFields,
    Priority,
    StopStrings,
    Stream,
    TemplateKwargs,
    TopK,
    User,
)
from services.gateway.apis.shared.other_servers import VLLM_RESPONSES
from services.gateway.apis.shared.request_model import Int64, RequestModel, at_most
from services.gateway.apis.shared.structured_output import StructuredOutputs, of_structured_outputs
from services.gateway.text.read_chat import MAX_NAME_CHARACTERS

MAX_TOP_LOGPROBS = 20  # OpenAI's limit
MAX_ID_CHARACTERS = 256  # of a response
LOGPROBS = "message.output_text.logprobs"



class TextFormat(RequestModel):
    """How the answer's text is structured."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    @pydantic.model_validator(mode="after")
    def _check_schema(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise PydanticCustomError("schema", "required for the type json_schema", {"field": "schema"})
        return self


class TextOptions(RequestModel):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: Label | None = Field(None, description=IGNORED)


class ReasoningOptions(RequestModel):
    """Options of the reasoning."""

    effort: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)] | None = Field(
        None, description="Variable reasoning_effort of the chat template; none also sets enable_thinking to false"
    )
    summary: Label | None = Field(None, description="Accepted; the reasoning itself is given instead")


class ResponseStreamOptions(RequestModel):
    """Options of a streamed answer."""

    include_obfuscation: bool | None = Field(None, description=IGNORED)


class ResponsesRequest(NamedFields, IgnoredFields):
    """The conversation so far, or what follows an earlier response, and the options of the answer."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **VLLM_RESPONSES,
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "moderation": (),
        "prompt": (),
    }
    model: ModelName = None
    input: Input
    instructions: str | None = Field(None, description="Precedes the input, as a message of the system")
    max_output_tokens: Annotated[Int64, Field(ge=1)] | None = Field(
        None, description="Lowered to the rest of the context"
    )
    temperature: float | None = None
    top_p: float | None = None
    top_k: TopK = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Int64 | None = Field(
        None, description="The same seed gives the same tokens, except few that rounding may change"
    )
    stop: StopStrings = None  # vLLM's
    logit_bias: LogitBias = None
    ignore_eos: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    stream: Stream = None
    stream_options: ResponseStreamOptions | None = None
    timings_per_token: bool | None = Field(
        None, description="Give llama.cpp's timings: in events of new tokens and in the last one, else in the answer"
    )
    return_progress: bool | None = Field(
        None, description="Send further events response.in_progress with llama.cpp's prompt_progress"
    )
    enable_response_messages: bool | None = Field(
        None,
        description="Give vLLM's input_messages and output_messages: the prompt and the answer with their special "
        "tokens, as text and as token ids",
    )
    tools: ToolObjects = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: an answer ends after its first call")
    text: TextOptions | None = None
    structured_outputs: StructuredOutputs | None = Field(None, description="vLLM's field, in place of text.format")
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: TemplateKwargs = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: keep as many of the prompt's last tokens as leave room for max_output_tokens"
    )
    include: Annotated[list[Label] | None, at_most(MAX_METADATA)] = Field(
        None, description=f"{LOGPROBS}, or values without an effect here"
    )
    background: bool | None = Field(
        None, description="Answer at once, and go on: GET /v1/responses/{id} has the response, and the rest of a stream"
    )
    store: bool | None = Field(
        None, description="false: do not keep the answer. None is kept without gateway.store_responses"
    )
    previous_response_id: Annotated[str, Field(max_length=MAX_ID_CHARACTERS)] | None = Field(
        None, description="A stored response: its conversation precedes the input. Only with gateway.store_responses"
    )
    user: User = None
    metadata: Annotated[dict[str, str] | None, at_most(MAX_METADATA)] = Field(None, description="The answer repeats it")
    cache_salt: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="Only requests with the same salt share prompt prefixes"
    )
    priority: Priority = None
    access_programs: Any = Field(None, description=IGNORED)
    max_tool_calls: Int64 | None = Field(None, description=f"{IGNORED}: it limits tools that the server itself runs")

    @pydantic.model_validator(mode="after")
    def _check_form(self) -> ResponsesRequest:
        has_format = self.text is not None and self.text.format is not None and self.text.format.type != "text"
        if of_structured_outputs(self.structured_outputs) is not None and has_format:
            context = {"field": "structured_outputs"}
            raise PydanticCustomError("several_forms", "the answer can have one form, and text.format has one", context)
        return self

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer has log-probabilities."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    @property
    def logprobs_field(self) -> str:
        """The field that asks for log-probabilities."""
        return "top_logprobs" if self.top_logprobs else "include"
