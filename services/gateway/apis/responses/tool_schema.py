"""Tools and the choice among them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, Tag
from pydantic_core import PydanticCustomError

from services.gateway.apis.shared.parts import Description, ToolName, by_field, check_parts
from services.gateway.apis.shared.request_model import RequestModel, at_most
from services.gateway.text.tools.tool import MAX_TOOLS


class FunctionTool(RequestModel):
    """A function that the client runs."""

    type: Literal["function"]
    name: ToolName
    description: Description | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON Schema of an object")
    strict: bool | None = None


class CustomFormat(RequestModel):
    """The form of a custom tool's input; the model is told of a grammar, but not forced to it."""

    type: Literal["text", "grammar"]
    syntax: str | None = None
    definition: Description | None = None


class CustomTool(RequestModel):
    """A tool that gets a text."""

    type: Literal["custom"]
    name: ToolName
    description: Description | None = None
    format: CustomFormat | None = None


class LocalShellTool(RequestModel):
    """A shell on the client's machine."""

    type: Literal["local_shell"]


_Member = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[CustomTool, Tag("<custom>")],
    by_field("type", "function or custom"),
]


class NamespaceTool(RequestModel):
    """A group of tools; the model sees each as `NAMESPACE__NAME`."""

    type: Literal["namespace"]
    name: ToolName
    tools: Annotated[list[_Member], Field(fail_fast=True), at_most(MAX_TOOLS)]


class HostedTool(RequestModel):
    """A tool that OpenAI runs and that Codex always offers. The model is not told of it, and so does not call it."""

    type: str


_Tool = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[CustomTool, Tag("<custom>")]
    | Annotated[LocalShellTool, Tag("<local_shell>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[HostedTool, Tag("<web_search>")]
    | Annotated[HostedTool, Tag("<web_search_2025_08_26>")]
    | Annotated[HostedTool, Tag("<web_search_preview>")]
    | Annotated[HostedTool, Tag("<image_generation>")]
    | Annotated[HostedTool, Tag("<tool_search>")],
    by_field("type", "function, custom, local_shell or namespace"),
]
ToolObjects = Annotated[
    list[_Tool] | None, Field(fail_fast=True), pydantic.BeforeValidator(check_parts), at_most(MAX_TOOLS)
]


class NamedTool(RequestModel):
    """Names a tool."""

    type: Literal["function", "custom", "local_shell"]
    name: str | None = None
    namespace: str | None = None

    @pydantic.model_validator(mode="after")
    def _check_name(self) -> NamedTool:
        if self.type != "local_shell" and not self.name:
            raise PydanticCustomError("name", "required for the type {type}", {"type": self.type, "field": "name"})
        return self


class AllowedTools(RequestModel):
    """Lets the model choose among some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True), at_most(MAX_TOOLS)]


def _tag(value: Any) -> str:
    if isinstance(value, str):
        return "<mode>"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<allowed>" if kind == "allowed_tools" else "<tool>"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
    | Annotated[AllowedTools, Tag("<allowed>")]
    | Annotated[NamedTool, Tag("<tool>")],
    pydantic.Discriminator(_tag),
]
