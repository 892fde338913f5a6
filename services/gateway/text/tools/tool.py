"""`Tool`, and the reading of a client's tools and choice. All limits of tools are checked here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pydantic_core import from_json

from services.common.errors import InvalidRequest
from services.common.shorten import quote

MAX_TOOLS = 128  # as with OpenAI
MAX_TOOLS_BYTES = 256 * 2**10  # of all tools, as JSON
MAX_TOOLS_DEPTH = 64
MAX_DESCRIPTION_CHARACTERS = 32 * 2**10  # of one tool
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # OpenAI's rule
FUNCTION_PREFIX = "function:"  # of a choice that names a tool


class ToolChoice(Enum):
    """Whether an answer must have calls."""

    NONE = "none"  # the model sees no tools
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any] | None  # JSON Schema of the arguments; None: no arguments
    is_strict: bool  # whether arguments must be valid against it
    definition: Mapping[str, Any]  # as the client wrote it, for the chat template
    path: str  # of its parameters in a request for a chat, such as tools[0].function.parameters


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one request."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice.NONE
    chosen: str | None = None  # the name, for `ToolChoice.NAMED`
    is_parallel: bool = True  # whether an answer may have several calls

    @property
    def is_demanded(self) -> bool:
        """Whether an answer must have a call."""
        return self.choice in (ToolChoice.REQUIRED, ToolChoice.NAMED)

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that an answer may call."""
        if self.choice is ToolChoice.NAMED:
            return tuple(tool for tool in self.tools if tool.name == self.chosen)
        return () if self.choice is ToolChoice.NONE else self.tools


def read_tools(text: str, choice: str, is_parallel: bool) -> Tools:
    """The tools of a message's JSON text and the choice among them. Raises `InvalidRequest` for the first error.

    `check_tools_size` comes before it.
    """
    tools = _read_list(text)
    kind, chosen = _read_choice(choice, tools)
    return Tools(tools, kind, chosen, is_parallel)


NO_TOOLS = Tools()


def check_tools_size(text: str) -> None:
    """Raises `InvalidRequest` for tools that are too long to be read."""
    num_bytes = len(text.encode())
    if num_bytes > MAX_TOOLS_BYTES:
        raise InvalidRequest(f"tools has {num_bytes} bytes of JSON, at most {MAX_TOOLS_BYTES} allowed", "tools")


def _read_list(text: str) -> tuple[Tool, ...]:
    if not text:
        return ()
    try:
        definitions = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"tools is not JSON: {error}", "tools") from error
    if not isinstance(definitions, list):
        raise InvalidRequest("tools is not a JSON array", "tools")
    if len(definitions) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(definitions)} elements, at most {MAX_TOOLS} allowed", "tools")
    tools = tuple(_read_tool(definition, f"tools[{i}]") for i, definition in enumerate(definitions))
    first: dict[str, int] = {}
    for i, tool in enumerate(tools):
        if (other := first.setdefault(tool.name, i)) != i:
            raise InvalidRequest(
                f"tools[{i}].function.name is {tool.name!r}, which is the name of tools[{other}], too",
                f"tools[{i}].function.name",
            )
    return tools


def _read_tool(definition: Any, path: str) -> Tool:
    if not isinstance(definition, dict):
        raise InvalidRequest(f"{path} is not an object", path)
    if definition.get("type") != "function":
        kind = definition.get("type")
        shown = "missing" if kind is None else quote(str(kind))
        raise InvalidRequest(f"{path}.type is {shown}, must be 'function'", f"{path}.type")
    function = definition.get("function")
    path += ".function"
    if not isinstance(function, dict):
        raise InvalidRequest(f"{path} is {'missing' if function is None else 'not an object'}", path)
    name = function.get("name")
    if not isinstance(name, str):
        raise InvalidRequest(f"{path}.name is {'missing' if name is None else 'not a string'}", f"{path}.name")
    if not NAME.fullmatch(name):
        raise InvalidRequest(
            f"{path}.name is {quote(name)} with {len(name)} characters, must be 1 to 64 letters, digits, _ and -",
            f"{path}.name",
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(f"{path}.description is not a string", f"{path}.description")
    if description is not None and len(description) > MAX_DESCRIPTION_CHARACTERS:
        raise InvalidRequest(
            f"{path}.description has {len(description)} characters, at most {MAX_DESCRIPTION_CHARACTERS} allowed",
            f"{path}.description",
        )
    is_strict = function.get("strict")
    if is_strict is not None and not isinstance(is_strict, bool):
        raise InvalidRequest(f"{path}.strict is not a boolean", f"{path}.strict")
    path += ".parameters"
    return Tool(name, _read_parameters(function.get("parameters"), path), bool(is_strict), definition, path)


def _read_parameters(schema: Any, path: str) -> dict[str, Any] | None:
    if schema is None:
        return None
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{path} is not an object, must be a JSON Schema of an object", path)
    kind = schema.get("type", "object")
    if kind != "object":
        raise InvalidRequest(f"{path}.type is {quote(str(kind))}, must be 'object'", f"{path}.type")
    properties = schema.get("properties")
    if properties is not None and not isinstance(properties, dict):
        raise InvalidRequest(f"{path}.properties is not an object", f"{path}.properties")
    if (depth := depth_of(schema)) > MAX_TOOLS_DEPTH:
        raise InvalidRequest(f"{path} is nested {depth} deep, at most {MAX_TOOLS_DEPTH} allowed", path)
    return schema


def _read_choice(choice: str, tools: Sequence[Tool]) -> tuple[ToolChoice, str | None]:
    if choice.startswith(FUNCTION_PREFIX):
        chosen = choice.removeprefix(FUNCTION_PREFIX)
        if all(tool.name != chosen for tool in tools):
            names = ", ".join([tool.name for tool in tools[:10]] + ["..."] * (len(tools) > 10)) or "there are none"
            raise InvalidRequest(
                f"tool_choice names {quote(chosen)}, which is not one of the tools: {names}",
                "tool_choice",
            )
        return ToolChoice.NAMED, chosen
    if choice not in ("", "none", "auto", "required"):
        raise InvalidRequest(
            f"tool_choice is {quote(choice)}, must be none, auto, required or {FUNCTION_PREFIX}NAME", "tool_choice"
        )
    if choice in ("auto", "required") and not tools:
        raise InvalidRequest(f"tool_choice is {choice}, but there are no tools", "tool_choice")
    return (ToolChoice(choice or "auto") if tools else ToolChoice.NONE), None


def depth_of(value: Any) -> int:
    """The depth of nested lists and objects; the JSON parser limits it."""
    if not isinstance(value, list | dict):
        return 0
    return 1 + max(map(depth_of, value.values() if isinstance(value, dict) else value), default=0)
