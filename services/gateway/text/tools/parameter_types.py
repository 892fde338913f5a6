"""What the schema of a parameter says about how its value is written, in formats without quotation marks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CHOICES = ("anyOf", "oneOf")
_TYPES = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}


def is_written_as_text(schema: Any) -> bool:
    """Whether a value is text as it stands, for it can only be a string, or nothing is said. Otherwise it is JSON."""
    if not isinstance(schema, Mapping):
        return True
    if not {*_CHOICES, "allOf", "$ref"}.isdisjoint(schema):
        return False
    return json_types(schema) in (None, {"string"})


def json_types(schema: Any) -> frozenset[str] | None:
    """The types of JSON that a value may have, an integer being a number; None if that is not said here."""
    if not isinstance(schema, Mapping):
        return None
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return frozenset("number" if each == "integer" else str(each) for each in named)
    for key in _CHOICES:
        if isinstance(schema.get(key), list):
            parts = [json_types(each) for each in schema[key]]
            return None if None in parts else frozenset().union(*parts)
    if "const" in schema:
        return frozenset({type_of(schema["const"])})
    if isinstance(schema.get("enum"), list):
        return frozenset(map(type_of, schema["enum"]))
    return None


def type_of(value: Any) -> str:
    """The type of a value that was read from JSON."""
    return _TYPES.get(type(value), "null")
