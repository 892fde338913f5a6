"""Tools of the Responses API as functions, the only tools that models know, and the names by which calls return.

A function keeps its name. A tool of a namespace is named `NAMESPACE__NAME`. A custom tool is a function with one text,
and the local shell a function with the fields of its action.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from services.common.errors import InvalidRequest
from services.common.shorten import quote
from services.gateway.apis.responses.schema import ResponsesRequest
from services.gateway.apis.responses.tool_schema import (
    AllowedTools,
    CustomTool,
    FunctionTool,
    LocalShellTool,
    NamedTool,
    NamespaceTool,
)
from services.gateway.text.tools.tool import FUNCTION_PREFIX

LOCAL_SHELL = "local_shell"
CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
SHELL_PARAMETERS = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
    },
    "required": ["command"],
}
SHELL_DESCRIPTION = "Runs a command on the user's machine and returns its output."


class ToolKind(Enum):
    """In which form a call returns to the client."""

    FUNCTION = "function"
    CUSTOM = "custom"
    LOCAL_SHELL = "local_shell"


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool of the request, as a function."""

    kind: ToolKind
    name: str  # as the client named it
    namespace: str | None
    description: str
    parameters: dict[str, Any] | None
    path: str  # in the request, such as tools[0]
    is_strict: bool | None = None

    @property
    def function_name(self) -> str:
        """The name that the model sees."""
        return function_name(self.name, self.namespace)

    def definition(self) -> dict[str, Any]:
        """The tool in the form of chat completions, which templates expect."""
        function: dict[str, Any] = {"name": self.function_name}
        if self.description:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        if self.is_strict is not None:
            function["strict"] = self.is_strict
        return {"type": "function", "function": function}


def function_name(name: str, namespace: str | None) -> str:
    """The name that the model sees for a tool."""
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


def offered_tools(body: ResponsesRequest) -> dict[str, OfferedTool]:
    """The tools that the model is offered, by the name that it sees. Raises `InvalidRequest` for equal names."""
    offered: dict[str, OfferedTool] = {}
    for i, tool in enumerate(_all_tools(body)):
        if tool.function_name in offered:
            raise InvalidRequest(f"tools has {quote(tool.function_name)} twice, again as number {i}", "tools")
        offered[tool.function_name] = tool
    choice = body.tool_choice
    if isinstance(choice, AllowedTools):
        allowed = {_chosen_name(each, offered) for each in choice.tools}
        return {name: tool for name, tool in offered.items() if name in allowed}
    return offered


def choice_text(body: ResponsesRequest, offered: dict[str, OfferedTool]) -> str:
    """The choice as in `Chat.tool_choice` of gRPC. Raises `InvalidRequest` for a tool that is not offered."""
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        return FUNCTION_PREFIX + _chosen_name(choice, offered)
    mode = choice.mode if isinstance(choice, AllowedTools) else choice or ""
    return "" if mode == "auto" and not offered else mode  # as with OpenAI, auto needs no tools


def _chosen_name(choice: NamedTool, offered: dict[str, OfferedTool]) -> str:
    name = function_name(choice.name or LOCAL_SHELL, choice.namespace)
    if name not in offered:
        raise InvalidRequest(f"tool_choice names {quote(name)}, which is not one of the tools", "tool_choice")
    return name


def _all_tools(body: ResponsesRequest) -> Iterator[OfferedTool]:
    for i, tool in enumerate(body.tools or ()):
        path = f"tools[{i}]"
        if isinstance(tool, NamespaceTool):
            for j, member in enumerate(tool.tools):
                yield _offered(member, tool.name, f"{path}.tools[{j}]")
        elif isinstance(tool, FunctionTool | CustomTool):
            yield _offered(tool, None, path)
        elif isinstance(tool, LocalShellTool):
            yield OfferedTool(ToolKind.LOCAL_SHELL, LOCAL_SHELL, None, SHELL_DESCRIPTION, SHELL_PARAMETERS, path)


def _offered(tool: FunctionTool | CustomTool, namespace: str | None, path: str) -> OfferedTool:
    description = tool.description or ""
    if isinstance(tool, FunctionTool):
        return OfferedTool(
            ToolKind.FUNCTION, tool.name, namespace, description, tool.parameters, path, is_strict=tool.strict
        )
    if tool.format is not None and tool.format.definition:
        description += f"\nGrammar of the input ({tool.format.syntax}):\n{tool.format.definition}"
    return OfferedTool(ToolKind.CUSTOM, tool.name, namespace, description.strip(), CUSTOM_PARAMETERS, path)
