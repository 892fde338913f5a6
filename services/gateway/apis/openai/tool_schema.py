"""Tools and their calls, as in OpenAI's reference, in requests and answers of chats."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Discriminator, Field, Tag
from typing_extensions import TypedDict

from services.gateway.apis.shared.request_model import RequestModel, at_most
from services.gateway.text.read_chat import MAX_CALLS
from services.gateway.text.tools.tool import MAX_TOOLS


class FunctionName(RequestModel):
    """Names a tool."""

    name: str


class NamedToolChoice(RequestModel):
    """Demands a call of this tool."""

    type: Literal["function"]
    function: FunctionName


ToolChoiceObject = Annotated[
    Annotated[Literal["none", "auto", "required", "any"], Tag("<mode>")] | Annotated[NamedToolChoice, Tag("<tool>")],
    Discriminator(lambda value: "<mode>" if isinstance(value, str) else "<tool>"),
    Field(description="none: the model sees no tools; auto: it decides; required, any: at least one call; or one tool"),
]
ToolObjects = Annotated[
    list[Any] | None,
    at_most(MAX_TOOLS),
    Field(
        description='The tools that the model may call: {"type": "function", "function": {"name", "description", '
        '"parameters", "strict"}}; at most 128 tools and 262144 bytes of JSON, nested at most 64 deep'
    ),
]


class FunctionCall(RequestModel):
    """Which tool was called, and how."""

    name: str
    arguments: str | None = Field(None, description="JSON text")


class ToolCallObject(RequestModel):
    """A call in an earlier message of the assistant."""

    id: str
    type: Literal["function"] | None = None
    function: FunctionCall


ToolCalls = Annotated[list[ToolCallObject] | None, at_most(MAX_CALLS)]


class AnswerFunction(TypedDict):
    """Which tool to call; `arguments` is JSON text."""

    name: str
    arguments: str


class AnswerToolCall(TypedDict):
    """A call that the model makes."""

    id: str
    type: Literal["function"]
    function: AnswerFunction


class FunctionDelta(TypedDict):
    """A piece of a call; only the first one has the name."""

    name: NotRequired[str]
    arguments: str


class ToolCallDeltaObject(TypedDict):
    """A piece of call `index` of an answer; only the first one has id and type."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta
