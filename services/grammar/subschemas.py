"""The parts of a JSON Schema that its values have to satisfy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from services.grammar.schema_ids import References


def subschemas(root: Any, references: References) -> list[dict[str, Any]]:
    """All object schemas that matter for the values of `root`, each once, and each before those that only it names."""
    found: dict[int, dict[str, Any]] = {}  # by identity
    open_ = [root]
    while open_:
        schema = open_.pop()
        if isinstance(schema, dict) and id(schema) not in found:
            found[id(schema)] = schema
            open_ += _named_by(schema, references)
    return list(found.values())


def as_list(value: Any) -> list[Any]:
    """A list as it is; anything else, which the compiler refuses, as an empty one."""
    return value if isinstance(value, list) else []


def as_dict(value: Any) -> dict[str, Any]:
    """An object as it is; anything else, which the compiler refuses, as an empty one."""
    return value if isinstance(value, dict) else {}


def _named_by(schema: dict[str, Any], references: References) -> Iterator[Any]:
    if "$ref" in schema:
        yield references.target(schema)
    for key in ("allOf", "anyOf", "oneOf", "prefixItems", "items"):
        yield from as_list(schema.get(key))
    for key in ("properties", "patternProperties"):
        yield from as_dict(schema.get(key)).values()
    yield from (schema.get(key) for key in ("items", "additionalItems", "additionalProperties"))
