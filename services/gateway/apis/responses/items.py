"""Items of the input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field, Tag
from pydantic_core import PydanticCustomError

from services.gateway.apis.shared.parts import MAX_PARTS, CallId, ToolName, by_field, by_shape, check_parts, readable
from services.gateway.apis.shared.request_model import RequestModel, at_most
from services.gateway.request.read_request import MAX_MESSAGES


class TextPart(RequestModel):
    """Text."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPart(RequestModel):
    """An earlier answer that refused the request."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ImagePart(RequestModel):
    """A picture, for models that see pictures."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"file_id": ()}
    type: Literal["input_image", "image_url"]
    image_url: str = Field(
        description="data:image/...;base64,... or, of hosts in gateway.image_hosts, https://...; or an object with url "
        "and detail, as in chats"
    )
    detail: Literal["low", "high", "auto"] | None = Field(None, description="low: a smaller copy is enough")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _read_object(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(given := data.get("image_url"), dict) and "url" in given:
            return {**data, "image_url": given["url"], "detail": data.get("detail") or given.get("detail")}
        return data


_MessagePart = Annotated[
    Annotated[TextPart, Tag("<input_text>")]
    | Annotated[TextPart, Tag("<output_text>")]
    | Annotated[TextPart, Tag("<text>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[ImagePart, Tag("<input_image>")]
    | Annotated[ImagePart, Tag("<image_url>")],
    by_field("type", "input_text, input_image, output_text or refusal"),
    readable,
]
_MessageParts = Annotated[list[_MessagePart], Field(fail_fast=True), at_most(MAX_PARTS)]
_Part = Annotated[
    Annotated[TextPart, Tag("<input_text>")]
    | Annotated[TextPart, Tag("<output_text>")]
    | Annotated[TextPart, Tag("<text>")]
    | Annotated[RefusalPart, Tag("<refusal>")],
    by_field("type", "input_text, output_text or refusal"),
    readable,
]
_Parts = Annotated[list[_Part], Field(fail_fast=True), at_most(MAX_PARTS)]
Texts = Annotated[Annotated[str, Tag("<text>")] | Annotated[_Parts, Tag("<texts>")], by_shape()]


class MessageItem(RequestModel):
    """A message; an earlier answer has the role assistant."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"] = Field(description="developer means system")
    content: Annotated[Annotated[str, Tag("<text>")] | Annotated[_MessageParts, Tag("<texts>")], by_shape()]

    @pydantic.model_validator(mode="after")
    def _check_images(self) -> MessageItem:
        if self.role != "user" and self.images:
            raise PydanticCustomError("role", "pictures are for the role user", {"field": "content"})
        return self

    @property
    def images(self) -> list[ImagePart]:
        return [] if isinstance(self.content, str) else [p for p in self.content if isinstance(p, ImagePart)]


class FunctionCallItem(RequestModel):
    """A call of a function in an earlier answer."""

    type: Literal["function_call"]
    call_id: CallId
    name: ToolName
    namespace: ToolName | None = None
    arguments: str = Field(description="JSON text")


class CustomCallItem(RequestModel):
    """A call of a custom tool in an earlier answer."""

    type: Literal["custom_tool_call"]
    call_id: CallId
    name: ToolName
    namespace: ToolName | None = None
    input: str


class ShellCallItem(RequestModel):
    """A call of the local shell in an earlier answer."""

    type: Literal["local_shell_call"]
    call_id: CallId
    action: dict[str, Any]


class CallOutputItem(RequestModel):
    """What a tool returned. Some clients name the call of a local shell by `id`."""

    type: Literal["function_call_output", "custom_tool_call_output", "local_shell_call_output"]
    call_id: CallId | None = None
    id: CallId | None = None
    output: Annotated[Annotated[str, Tag("<text>")] | Annotated[_MessageParts, Tag("<texts>")], by_shape()]

    @property
    def answered_id(self) -> str:
        return self.call_id or self.id or ""


class ReasoningText(RequestModel):
    """A text of reasoning."""

    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningItem(RequestModel):
    """Reasoning of an earlier answer. Summaries and encrypted content of other servers are left out."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText] | None, Field(fail_fast=True), at_most(MAX_PARTS)] = None


class SearchItem(RequestModel):
    """A search of another server in an earlier answer; left out."""

    type: Literal["web_search_call"]


_Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[CustomCallItem, Tag("<custom_tool_call>")]
    | Annotated[ShellCallItem, Tag("<local_shell_call>")]
    | Annotated[CallOutputItem, Tag("<function_call_output>")]
    | Annotated[CallOutputItem, Tag("<custom_tool_call_output>")]
    | Annotated[CallOutputItem, Tag("<local_shell_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[SearchItem, Tag("<web_search_call>")],
    by_field("type", "message, reasoning, or a call or output of a function, custom tool or local shell", "message"),
]
_Items = Annotated[
    list[_Item], Field(min_length=1, fail_fast=True), pydantic.BeforeValidator(check_parts), at_most(MAX_MESSAGES)
]
Input = Annotated[Annotated[str, Tag("<text>")] | Annotated[_Items, Tag("<texts>")], by_shape()]
