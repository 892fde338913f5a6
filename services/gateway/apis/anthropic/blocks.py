"""Messages and their content blocks in requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, Tag

from services.gateway.apis.shared.parts import MAX_PARTS, CallId, ToolName, by_field, by_shape, check_parts, readable
from services.gateway.apis.shared.request_model import RequestModel, at_most
from services.gateway.request.read_request import MAX_MESSAGES


class TextBlock(RequestModel):
    """Text."""

    type: Literal["text"]
    text: str


class Base64Source(RequestModel):
    """The file of a picture."""

    type: Literal["base64"]
    media_type: Literal["image/png", "image/jpeg", "image/webp", "image/gif"]
    data: str

    @property
    def url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(RequestModel):
    """Where a picture is; only of hosts in gateway.image_hosts."""

    type: Literal["url"]
    url: str


class ImageBlock(RequestModel):
    """A picture, for models that see pictures."""

    type: Literal["image"]
    source: Annotated[
        Annotated[Base64Source, Tag("<base64>")] | Annotated[UrlSource, Tag("<url>")], by_field("type", "base64 or url")
    ]


class ThinkingBlock(RequestModel):
    """Reasoning of an earlier answer. Its signature is not checked."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(RequestModel):
    """Reasoning that only Anthropic can read; the model does not see it."""

    type: Literal["redacted_thinking"]
    data: Annotated[str, Field(min_length=1)]


class ToolUseBlock(RequestModel):
    """A call in an earlier answer."""

    type: Literal["tool_use"]
    id: CallId
    name: ToolName
    input: dict[str, Any]


_TextBlocks = Annotated[
    list[Annotated[Annotated[TextBlock, Tag("<text>")], by_field("type", "text")]],
    Field(fail_fast=True),
    at_most(MAX_PARTS),
]
Texts = Annotated[Annotated[str, Tag("<text>")] | Annotated[_TextBlocks, Tag("<texts>")], by_shape()]


_ResultBlocks = Annotated[
    list[
        Annotated[
            Annotated[TextBlock, Tag("<text>")] | Annotated[ImageBlock, Tag("<image>")],
            by_field("type", "text or image"),
            readable,
        ]
    ],
    Field(fail_fast=True),
    at_most(MAX_PARTS),
]

_ResultContent = Annotated[Annotated[str, Tag("<text>")] | Annotated[_ResultBlocks, Tag("<texts>")], by_shape()]


class ToolResultBlock(RequestModel):
    """What a tool returned."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: _ResultContent | None = None
    is_error: bool | None = Field(None, description="true: the model sees `Error: ` before the content")


_UserBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    by_field("type", "text, image or tool_result"),
    readable,
]
_AssistantBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")],
    by_field("type", "text, thinking, redacted_thinking or tool_use"),
]
_UserBlocks = Annotated[list[_UserBlock], Field(fail_fast=True), at_most(MAX_PARTS)]
_AssistantBlocks = Annotated[list[_AssistantBlock], Field(fail_fast=True), at_most(MAX_PARTS)]


class UserMessage(RequestModel):
    """Texts of the user and results of tools."""

    role: Literal["user"]
    content: Annotated[Annotated[str, Tag("<text>")] | Annotated[_UserBlocks, Tag("<texts>")], by_shape()]


class AssistantMessage(RequestModel):
    """An earlier answer. If it is the last message, the new answer continues it."""

    role: Literal["assistant"]
    content: Annotated[Annotated[str, Tag("<text>")] | Annotated[_AssistantBlocks, Tag("<texts>")], by_shape()]


class SystemMessage(RequestModel):
    """Instructions in the middle of the conversation."""

    role: Literal["system"]
    content: Texts


_Message = Annotated[
    Annotated[UserMessage, Tag("<user>")]
    | Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[SystemMessage, Tag("<system>")],
    by_field("role", "user, assistant or system"),
]
Messages = Annotated[
    list[_Message],
    Field(min_length=1, fail_fast=True),
    pydantic.BeforeValidator(check_parts),
    at_most(MAX_MESSAGES),
]
