"""Forms of arguments in formats that do not write them as one JSON object: each parameter has a form of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.common.errors import InvalidRequest
from services.gateway.text.tools.parameter_types import is_written_as_text
from services.gateway.text.tools.pythonic import PARAMETER_NAME

TagFormat = dict[str, Any]  # a format of a structural tag
MAX_PARAMETERS = 64
# What may stand beside the parameters of an object without changing which arguments are valid.
_KNOWN_KEYS = {
    "type", "properties", "required", "additionalProperties", "title", "description", "$schema", "$defs", "definitions",
    "$id", "$comment", "examples", "default",
}  # fmt: skip
# Rules for a string that free text would not keep.
_STRING_RULES = {"pattern", "format", "minLength", "maxLength"}


def _sequence(*elements: TagFormat) -> TagFormat:
    return {"type": "sequence", "elements": list(elements)}


def _choice(elements: Sequence[TagFormat]) -> TagFormat:
    return {"type": "or", "elements": list(elements)}


def _const(text: str) -> TagFormat:
    return {"type": "const_string", "value": text}


def _any_parameters(begin: str, *rest: TagFormat, separator: str) -> TagFormat:
    tag = {"type": "tag", "begin": begin, "content": _sequence(*rest), "end": ""}
    return {"type": "tags_with_separator", "tags": [tag], "separator": separator}


# Arguments of tools that are not strict: any names and values that the parser can read.
ANY_PYTHON_ARGUMENTS = _any_parameters(
    "",
    {"type": "regex", "pattern": "[a-zA-Z_][a-zA-Z0-9_]{0,63}="},
    {"type": "json_schema", "json_schema": {}},
    separator=", ",
)
ANY_TAGGED_ARGUMENTS = _any_parameters(
    "<parameter=",
    {"type": "regex", "pattern": "[^<>\\n]{1,64}"},
    _const(">\n"),
    {"type": "any_text"},
    _const("\n</parameter>\n"),
    separator="",
)


def python_arguments(schema: Mapping[str, Any]) -> TagFormat:
    """`a="x", b=3`: required parameters first. Values are JSON, which the parser reads as well as Python's literals."""

    def parameter(name: str, is_first: bool) -> TagFormat:
        begin = f"{name}=" if is_first else f", {name}="
        return _sequence(_const(begin), {"type": "json_schema", "json_schema": _schema_of(schema, name)})

    names = _names(schema)
    for name in names:
        if not PARAMETER_NAME.fullmatch(name):
            raise InvalidRequest(f"parameter {name[:64]!r} is no name in Python, which this model writes", "tools")
    return _parameters(schema, names, parameter)


def tagged_arguments(schema: Mapping[str, Any]) -> TagFormat:
    """Tags <parameter=a>: strings as they are, other values as JSON."""

    def parameter(name: str, is_first: bool) -> TagFormat:
        begin, end = f"<parameter={name}>\n", "\n</parameter>\n"
        own = schema["properties"][name]
        if not isinstance(own, Mapping) or not is_written_as_text(own):
            content: TagFormat = {"type": "json_schema", "json_schema": _schema_of(schema, name)}
        elif choices := own.get("enum") or ([own["const"]] if "const" in own else None):
            content = _choice([_const(str(choice)) for choice in choices])
        elif rules := _STRING_RULES & own.keys():
            raise InvalidRequest(
                f"parameter {name[:64]!r} has {', '.join(sorted(rules))}, which cannot be enforced for strings of "
                "this model's format",
                "tools",
            )
        else:
            content = {"type": "any_text"}
        return {"type": "tag", "begin": begin, "content": content, "end": end}

    names = _names(schema)
    if wrong := [name for name in names if not name or any(character in name for character in "<>\n")]:
        raise InvalidRequest(
            f"parameter {wrong[0][:64]!r} has characters that this model's format cannot write", "tools"
        )
    return _parameters(schema, names, parameter)


def _parameters(
    schema: Mapping[str, Any], names: Sequence[str], parameter: Callable[[str, bool], TagFormat]
) -> TagFormat:
    """All required parameters, then any of the others, in the order of the schema."""
    required = [name for name in names if name in schema.get("required", ())]
    optional = [name for name in names if name not in required]
    always = [parameter(name, index == 0) for index, name in enumerate(required)]
    if always or not optional:
        return _sequence(*always, *(_choice([parameter(name, False), _const("")]) for name in optional))
    # Nothing is required: any of the optional ones may come first.
    firsts = [
        _sequence(
            parameter(name, True),
            *(_choice([parameter(other, False), _const("")]) for other in optional[index + 1 :]),
        )
        for index, name in enumerate(optional)
    ]
    return _choice([*firsts, _const("")])


def _names(schema: Mapping[str, Any]) -> list[str]:
    if unknown := sorted(schema.keys() - _KNOWN_KEYS):
        raise InvalidRequest(
            f"its schema has {unknown[0][:64]!r}, which cannot be enforced in this model's format", "tools"
        )
    names = list(schema.get("properties") or {})
    missing = [name for name in schema.get("required") or () if name not in names]
    if missing:
        raise InvalidRequest(f"required parameter {str(missing[0])[:64]!r} is not one of its properties", "tools")
    if len(names) > MAX_PARAMETERS:
        raise InvalidRequest(
            f"it has {len(names)} parameters, at most {MAX_PARAMETERS} can be enforced in this model's format", "tools"
        )
    return names


def _schema_of(schema: Mapping[str, Any], name: str) -> Any:
    """The schema of one parameter, with the definitions that it may refer to."""
    own = schema["properties"][name]
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return {**shared, **own} if isinstance(own, Mapping) else own
