"""The body and the answer of Cohere's POST /v2/chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NotRequired

import pydantic
from pydantic import Field, Tag
from typing_extensions import TypedDict

from services.gateway.apis.shared.generation_fields import IGNORED, Priority, Stream
from services.gateway.apis.shared.parts import MAX_PARTS, CallId, ToolName, by_field, by_shape, check_parts
from services.gateway.apis.shared.request_model import Int32, Int64, RequestModel, UInt32, at_most
from services.gateway.apis.shared.structured_output import JsonSchema
from services.gateway.request.read_request import MAX_MESSAGES, MAX_STOP_STRINGS
from services.gateway.text.read_chat import MAX_CALLS
from services.gateway.text.tools.tool import MAX_TOOLS

MAX_DOCUMENTS = 256


class TextContent(RequestModel):
    """A part of a message that is text."""

    type: Literal["text"]
    text: str


class ThinkingContent(RequestModel):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str


class ImageUrl(RequestModel):
    """Where a picture is."""

    url: str
    detail: Literal["low", "high", "auto"] | None = None


class ImageContent(RequestModel):
    """A picture, for models that see pictures."""

    type: Literal["image_url"]
    image_url: ImageUrl


class Document(RequestModel):
    """Something to read: a text, or an object, which the model sees as JSON."""

    id: str | None = None
    data: str | dict[str, Any]


class DocumentContent(RequestModel):
    """A part of what a tool returned."""

    type: Literal["document"]
    document: Document


Content = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[
        list[
            Annotated[
                Annotated[TextContent, Tag("<text>")]
                | Annotated[ThinkingContent, Tag("<thinking>")]
                | Annotated[ImageContent, Tag("<image_url>")]
                | Annotated[DocumentContent, Tag("<document>")],
                by_field("type", "text, thinking, image_url or document"),
            ]
        ],
        Field(fail_fast=True),
        at_most(MAX_PARTS),
        Tag("<texts>"),
    ],
    by_shape(),
]


class CalledFunction(RequestModel):
    """Which tool was called, and how."""

    name: ToolName
    arguments: str | None = Field(None, description="JSON text")


class CohereCall(RequestModel):
    """A call in an earlier message."""

    id: CallId
    type: Literal["function"] | None = None
    function: CalledFunction


class CohereMessage(RequestModel):
    """One message of the chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Content | None = None
    tool_calls: Annotated[list[CohereCall] | None, at_most(MAX_CALLS)] = None
    tool_plan: str | None = Field(None, description="What the assistant wrote before its calls")
    tool_call_id: CallId | None = Field(None, description="For the role tool: the call that this message answers")


class CohereResponseFormat(RequestModel):
    """Structure of the answer."""

    type: Literal["text", "json_object"]
    json_schema: JsonSchema | None = None
    schema_: JsonSchema | None = Field(None, alias="schema", description="Another name of json_schema")


class CohereThinking(RequestModel):
    """Whether to reason."""

    type: Literal["enabled", "disabled"]
    token_budget: UInt32 | None = Field(None, description="Longest reasoning; for models that reason")


class CohereChatRequest(RequestModel):
    """The conversation so far, and the options of the answer."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"raw_prompting": (False,)}

    model: str
    messages: Annotated[
        list[CohereMessage],
        Field(min_length=1, fail_fast=True),
        pydantic.BeforeValidator(check_parts),
        at_most(MAX_MESSAGES),
    ]
    stream: Stream = None
    tools: Annotated[list[Any] | None, at_most(MAX_TOOLS)] = Field(None, description="As in chat completions")
    strict_tools: bool | None = Field(None, description="Calls match the schemas of their tools")
    tool_choice: Literal["REQUIRED", "NONE"] | None = None
    documents: Annotated[list[str | Document] | None, at_most(MAX_DOCUMENTS)] = Field(
        None, description="Variable of the chat template"
    )
    response_format: CohereResponseFormat | None = None
    max_tokens: Annotated[Int64, Field(ge=1)] | None = None
    stop_sequences: Annotated[list[str] | None, at_most(MAX_STOP_STRINGS)] = None
    temperature: float | None = None
    seed: Int64 | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    k: Int32 | None = Field(None, description="top_k of completions")
    p: float | None = Field(None, description="top_p of completions")
    logprobs: bool | None = Field(None, description="Give the log-probability of each token")
    thinking: CohereThinking | None = None
    priority: Priority = None
    citation_options: dict[str, Any] | None = Field(None, description=f"{IGNORED}: answers have no citations")
    safety_mode: str | None = Field(None, description=IGNORED)


class TextBlock(TypedDict):
    """Text of an answer."""

    type: Literal["text"]
    text: str


class ThinkingBlock(TypedDict):
    """Reasoning of an answer."""

    type: Literal["thinking"]
    thinking: str


class FunctionObject(TypedDict):
    """Which tool to call, and how."""

    name: str
    arguments: str


class CallObject(TypedDict):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: FunctionObject


class CohereAnswerMessage(TypedDict):
    """The answer."""

    role: Literal["assistant"]
    content: NotRequired[list[TextBlock | ThinkingBlock]]  # not of calls alone
    tool_calls: NotRequired[list[CallObject]]


class TokenCounts(TypedDict):
    """Numbers of tokens."""

    input_tokens: int
    output_tokens: int


class CohereUsage(TypedDict):
    """What the request took."""

    billed_units: TokenCounts
    tokens: TokenCounts
    cached_tokens: int


class LogprobItem(TypedDict):
    """A token of the answer."""

    text: str
    token_ids: list[int]
    logprobs: list[float]


class CohereAnswer(TypedDict):
    """The whole answer."""

    id: str
    finish_reason: Literal["COMPLETE", "STOP_SEQUENCE", "MAX_TOKENS", "TOOL_CALL", "ERROR"]
    message: CohereAnswerMessage
    usage: CohereUsage
    logprobs: NotRequired[list[LogprobItem]]
