"""Grammars of output that make a model call tools with arguments that are valid: structural tags, one for each format.

The dense worker samples only tokens that continue the grammar (`services/grammar/`), so such calls always parse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import InvalidRequest
from services.gateway.text.harmony import CHANNEL, CONSTRAIN, MESSAGE
from services.gateway.text.tools.parameter_forms import (
    ANY_PYTHON_ARGUMENTS,
    ANY_TAGGED_ARGUMENTS,
    TagFormat,
    python_arguments,
    tagged_arguments,
)
from services.gateway.text.tools.tool import Tool, ToolChoice, Tools

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_OBJECT: TagFormat = {"type": "json_schema", "json_schema": {"type": "object"}}


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """How calls are written in one format."""

    begin: Callable[[str], str]  # of a call, by the tool's name
    arguments: Callable[[Mapping[str, Any]], TagFormat]  # by the tool's schema. Raises `InvalidRequest`
    end: str  # of a call
    trigger: str  # the text at which a call begins
    separator: str = ""
    list_begin: str = ""  # before the first call
    list_end: str = ""  # after the last one
    any_arguments: TagFormat = field(default_factory=lambda: _ANY_OBJECT)  # of a tool that is not strict
    object_key: str = ""  # of the arguments, if a call is nothing but a JSON object, as another answer may be, too


def _json(schema: Mapping[str, Any]) -> TagFormat:
    return {"type": "json_schema", "json_schema": schema}


CALL_GRAMMARS: Mapping[str, CallGrammar] = {
    "harmony": CallGrammar(  # the answer ends with its only call
        lambda name: f"{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json{MESSAGE}",
        _json,
        "",
        f"{CHANNEL}commentary",
    ),
    "hermes": CallGrammar(
        lambda name: f'<tool_call>\n{{"name": "{name}", "arguments": ', _json, "}\n</tool_call>", "<tool_call>", "\n"
    ),
    "llama3_json": CallGrammar(
        lambda name: f'{{"name": "{name}", "parameters": ', _json, "}", '{"name": "', "; ", object_key="parameters"
    ),
    "mistral": CallGrammar(lambda name: f"[TOOL_CALLS]{name}[ARGS]", _json, "", "[TOOL_CALLS]"),
    "mistral_list": CallGrammar(
        lambda name: f'{{"name": "{name}", "arguments": ', _json, "}", "[TOOL_CALLS]", ", ", "[TOOL_CALLS] [", "]"
    ),
    "pythonic": CallGrammar(
        lambda name: f"{name}(", python_arguments, ")", "[", ", ", "[", "]", any_arguments=ANY_PYTHON_ARGUMENTS
    ),
    "qwen3_coder": CallGrammar(
        lambda name: f"<tool_call>\n<function={name}>\n",
        tagged_arguments,
        "</function>\n</tool_call>",
        "<tool_call>",
        "\n",
        any_arguments=ANY_TAGGED_ARGUMENTS,
    ),
}


def grammar_of_calls(tools: Tools, grammar: CallGrammar, *, has_other_grammar: bool) -> TagFormat | None:
    """The grammar of an answer to a request with tools; None if the model is free to write anything.

    `has_other_grammar`: an answer that is no call has a grammar of its own. The result then is that of calls alone,
    whatever the choice. Raises `InvalidRequest` for a schema that the format cannot be held to.
    """
    if not (has_other_grammar or tools.is_demanded or any(tool.is_strict for tool in tools.callable)):
        return None
    is_single = tools.choice is ToolChoice.NAMED or not tools.is_parallel
    is_strict = {tool.name: tools.is_demanded or tool.is_strict for tool in tools.callable}
    contents = [(tool, _arguments(tool, grammar, is_strict[tool.name])) for tool in tools.callable]
    if grammar.object_key and has_other_grammar:
        tags = [_object_tag(tool, content, grammar.object_key) for tool, content in contents]
    else:
        tags = [_tag(grammar.begin(tool.name), content, grammar.end) for tool, content in contents]
    if has_other_grammar or tools.is_demanded:
        calls = _calls(tags, grammar.separator, is_single)
        return _calls([_tag(grammar.list_begin, calls, grammar.list_end)], "", True) if grammar.list_begin else calls
    if grammar.list_begin:
        tags = _list_tags(contents, grammar, is_single)
        is_single = True  # all calls are in one list
    # A bracket begins many texts: the name belongs to the trigger.
    triggers = [tag["begin"] for tag in tags] if grammar.trigger == "[" else [grammar.trigger]
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags, "stop_after_first": is_single}


def _calls(tags: list[TagFormat], separator: str, is_single: bool) -> TagFormat:
    """At least one call, and nothing else."""
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": is_single,
    }


def _list_tags(contents: Sequence[tuple[Tool, TagFormat]], grammar: CallGrammar, is_single: bool) -> list[TagFormat]:
    """Tags of whole lists, one for each first call."""
    more: list[TagFormat] = []
    if not is_single:
        begins = [grammar.separator + grammar.begin(tool.name) for tool, _ in contents]
        others = [_tag(begin, content, grammar.end) for begin, (_, content) in zip(begins, contents, strict=True)]
        more = [{"type": "tags_with_separator", "tags": others, "separator": "", "at_least_one": False}]
    return [
        _tag(
            grammar.list_begin + grammar.begin(tool.name),
            {"type": "sequence", "elements": [content, {"type": "const_string", "value": grammar.end}, *more]},
            grammar.list_end,
        )
        for tool, content in contents
    ]


def _tag(begin: str, content: TagFormat, end: str) -> TagFormat:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _object_tag(tool: Tool, arguments: TagFormat, key: str) -> TagFormat:
    """A call as a schema, so that it and an answer that is JSON are told apart by their members alone."""
    schema = {"$id": f"urn:tool:{tool.name}", **arguments["json_schema"]}  # its references stay its own
    call = {
        "type": "object",
        "properties": {"name": {"const": tool.name}, key: schema},
        "required": ["name", key],
        "additionalProperties": False,
    }
    return _tag("", {**arguments, "json_schema": call}, "")


def _arguments(tool: Tool, grammar: CallGrammar, is_strict: bool) -> TagFormat:
    if not is_strict:
        return {**grammar.any_arguments, "origin": tool.path}
    schema = NO_ARGUMENTS if tool.parameters is None else tool.parameters
    try:
        return {**grammar.arguments({"type": "object", **schema}), "origin": tool.path}
    except InvalidRequest as error:
        raise InvalidRequest(f"{describe_parameters(tool)}: {error}", tool.path) from error


def describe_parameters(tool: Tool) -> str:
    """How a message begins that says why calls of a tool cannot be held to its schema."""
    return f"the parameters of the tool {tool.name!r} cannot be enforced"
