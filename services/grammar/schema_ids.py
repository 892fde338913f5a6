"""Ids and anchors of a JSON Schema: what its references mean, the subschemas in use, and ids that two of them have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from services.grammar.grammar_error import GrammarError

_VALUES = ("const", "enum", "default", "examples")  # of these keywords are no schemas
_OLD_DRAFTS = ("draft-04", "draft-06", "draft-07")  # there `$ref` makes its neighbours mean nothing


def check_ids(root: Any) -> None:
    """Raises `GrammarError` if two subschemas of a schema, wherever they stand, have the same `$id`."""
    seen: set[str] = set()
    for schema, base in _with_bases(root, ignores_neighbours=False):
        if isinstance(schema.get("$id"), str):
            if base in seen:
                raise GrammarError(f"two subschemas have the $id {base[:100]!r}")
            seen.add(base)


class References:
    """What the references within a schema mean. Subschemas are known by identity."""

    def __init__(self, root: Any) -> None:
        """Raises `GrammarError` for an `$id` that is no URI."""
        self._bases: dict[int, str] = {}  # of subschemas, without anchors
        self._root, self._named = root, {"": root}  # the latter by URI
        given = root.get("$schema") if isinstance(root, dict) else None
        is_old = isinstance(given, str) and any(draft in given for draft in _OLD_DRAFTS)
        for schema, base in _with_bases(root, ignores_neighbours=is_old):
            self._named.setdefault(base, schema)
            self._bases[id(schema)] = resource = urldefrag(base)[0]
            if isinstance(schema.get("$anchor"), str):
                self._named.setdefault(f"{resource}#{schema['$anchor']}", schema)

    def subschemas(self) -> list[dict[str, Any]]:
        """All object schemas that matter for the schema's values, each once, and each before those that only it names.
        """
        found: dict[int, dict[str, Any]] = {}  # by identity
        open_ = [self._root]
        while open_:
            schema = open_.pop()
            if isinstance(schema, dict) and id(schema) not in found:
                found[id(schema)] = schema
                open_ += self._named_by(schema)
        return list(found.values())

    def _named_by(self, schema: dict[str, Any]) -> Iterator[Any]:
        if "$ref" in schema:
            yield self.target(schema)
        for key in ("allOf", "anyOf", "oneOf", "prefixItems", "items"):
            yield from as_list(schema.get(key))
        for key in ("properties", "patternProperties"):
            yield from as_dict(schema.get(key)).values()
        yield from (schema.get(key) for key in ("items", "additionalItems", "additionalProperties"))

    def target(self, schema: dict[str, Any]) -> Any:
        """What the `$ref` of a subschema names; True, the schema of all values, if it is not in the document."""
        reference, base = schema["$ref"], self._bases.get(id(schema), "")
        if not isinstance(reference, str):
            return True
        try:
            uri, fragment = urldefrag(base + reference if reference.startswith("#") else urljoin(base, reference))
        except ValueError:
            return True
        if fragment and not fragment.startswith("/"):
            return self._named.get(f"{uri}#{fragment}", True)
        return _pointed(self._named.get(uri, True), unquote(fragment))


def as_list(value: Any) -> list[Any]:
    """A list as it is; anything else, which the compiler refuses, as an empty one."""
    return value if isinstance(value, list) else []


def as_dict(value: Any) -> dict[str, Any]:
    """An object as it is; anything else, which the compiler refuses, as an empty one."""
    return value if isinstance(value, dict) else {}


def _pointed(found: Any, pointer: str) -> Any:
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return True
    return found


def _with_bases(root: Any, *, ignores_neighbours: bool) -> Iterator[tuple[dict[str, Any], str]]:
    """All objects that may be subschemas, each with the URI that relative ones are resolved against."""
    open_ = [(root, "")]
    while open_:
        value, base = open_.pop()
        if isinstance(value, list):
            open_ += [(each, base) for each in value]
        elif isinstance(value, dict):
            if isinstance(value.get("$id"), str) and not (ignores_neighbours and "$ref" in value):
                base = _resolve(base, value["$id"])
            yield value, base
            open_ += [(each, base) for key, each in value.items() if key not in _VALUES]


def _resolve(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference.removesuffix("#"))
    except ValueError as error:
        raise GrammarError(f"$id {reference[:100]!r} is not a URI: {error}") from error
