"""The parts of a JSON Schema that its values have to satisfy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote


def subschemas(root: Any) -> list[dict[str, Any]]:
    """All object schemas that matter for the values of `root`, each once, and each before those that only it names."""
    found: dict[int, dict[str, Any]] = {}  # by identity
    open_ = [root]
    while open_:
        schema = open_.pop()
        if isinstance(schema, dict) and id(schema) not in found:
            found[id(schema)] = schema
            open_ += _named_by(schema, root)
    return list(found.values())


def target(reference: Any, root: Any) -> Any:
    """What a `$ref` within the document names; True, the schema of all values, for any other."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return True
    found = root
    for part in unquote(reference[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return True
    return found


def as_list(value: Any) -> list[Any]:
    """A list as it is; anything else, which the compiler refuses, as an empty one."""
    return value if isinstance(value, list) else []


def as_dict(value: Any) -> dict[str, Any]:
    """An object as it is; anything else, which the compiler refuses, as an empty one."""
    return value if isinstance(value, dict) else {}


def _named_by(schema: dict[str, Any], root: Any) -> Iterator[Any]:
    if "$ref" in schema:
        yield target(schema["$ref"], root)
    for key in ("allOf", "anyOf", "oneOf", "prefixItems", "items"):
        yield from as_list(schema.get(key))
    for key in ("properties", "patternProperties"):
        yield from as_dict(schema.get(key)).values()
    yield from (schema.get(key) for key in ("items", "additionalItems", "additionalProperties"))
