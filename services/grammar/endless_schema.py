"""Finds parts of JSON Schemas that no finite text satisfies, such as an object that requires itself as a property.

llguidance accepts them, and an answer that begins such a part would only end at `max_tokens`. For each subschema we
look for the types of JSON that a finite valid value can have. These sets grow from nothing until no subschema adds a
type: a least fixpoint, as it finds the symbols of a grammar that derive a text. It is an upper bound: a schema without
any type has no finite value. The greatest fixpoint of the same equations has the types of endless values, too; a schema
that has none even there is not endless but forbids all values, as `false` does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from services.common.json_files.patterns import PatternError, PatternMatcher
from services.grammar.grammar_error import GrammarError
from services.grammar.schema_ids import References, as_dict, as_list

_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
_NONE: frozenset[str] = frozenset()
_MAX_PATTERNS_S = 0.25  # that all patterns of a schema may take here


def check_ends(text: str) -> None:
    """Raises `GrammarError` for a schema, as JSON text, with a part that only an endless text satisfies."""
    try:
        root = json.loads(text)
    except (ValueError, RecursionError):
        return  # whoever compiles it says what is wrong
    endless = _EndlessSchemas(root).first()
    if endless is not None:
        raise GrammarError(
            f"only an endless text is valid against {json.dumps(endless)[:100]} in the schema: "
            "it requires itself for ever"
        )


class _EndlessSchemas:
    """The subschemas of a schema, and the types that their finite values can have. Schemas are known by identity."""

    def __init__(self, root: Any) -> None:
        self._references = References(root)
        self._schemas = self._references.subschemas()
        self._types: dict[int, frozenset[str]] = {}
        self._patterns = PatternMatcher(_MAX_PATTERNS_S)

    def first(self) -> dict[str, Any] | None:
        """The first reference on the way from the root that endless values alone satisfy; None if there is none."""
        if not any("$ref" in each for each in self._schemas):
            return None  # only references make a schema endless
        self._solve(_NONE)
        without_end = [each for each in self._schemas if "$ref" in each and not self._of(each)]
        if without_end:
            self._solve(_TYPES)
        return next((each for each in without_end if self._of(each)), None)

    def _solve(self, start: frozenset[str]) -> None:
        """Finds the types of all subschemas: those of finite values from none, and of endless ones, too, from all."""
        self._types = {id(schema): start for schema in self._schemas}
        while self._improve():
            pass

    def _improve(self) -> bool:
        has_changed = False
        for schema in reversed(self._schemas):
            types = self._find(schema)
            has_changed |= types != self._types[id(schema)]
            self._types[id(schema)] = types
        return has_changed

    def _of(self, schema: Any) -> frozenset[str]:
        if isinstance(schema, dict):
            return self._types[id(schema)]
        return _NONE if schema is False else _TYPES

    def _find(self, schema: dict[str, Any]) -> frozenset[str]:
        """The types of a schema's finite values, by what is known of those that it names."""
        types = _declared(schema)
        if "$ref" in schema:
            types &= self._of(self._references.target(schema))
        for each in as_list(schema.get("allOf")):
            types &= self._of(each)
        for key in ("anyOf", "oneOf"):
            if options := as_list(schema.get(key)):
                types &= _NONE.union(*map(self._of, options))
        if "object" in types and not self._has_object(schema):
            types -= {"object"}
        if "array" in types and not self._has_array(schema):
            types -= {"array"}
        return types

    def _has_object(self, schema: dict[str, Any]) -> bool:
        properties, patterns = as_dict(schema.get("properties")), as_dict(schema.get("patternProperties"))
        others = schema.get("additionalProperties", True)
        for name in as_list(schema.get("required")):
            if not isinstance(name, str):
                continue  # the compiler refuses it
            try:
                rules = [rule for pattern, rule in patterns.items() if self._patterns.search(pattern, name) is not None]
            except PatternError:
                continue  # whoever compiles it says what is wrong; one that takes too long counts as satisfied
            rules += [properties[name]] if name in properties else []
            if not all(map(self._of, rules or [others])):
                return False
        if self._of(others) or any(map(self._of, patterns.values())):
            return True
        return _count(schema.get("minProperties")) <= sum(1 for each in properties.values() if self._of(each))

    def _has_array(self, schema: dict[str, Any]) -> bool:
        first, rest = as_list(schema.get("prefixItems")), schema.get("items", True)
        if isinstance(rest, list):  # as before draft 2020-12
            first, rest = rest, schema.get("additionalItems", True)
        min_items = _count(schema.get("minItems"))
        return all(map(self._of, first[:min_items])) and (min_items <= len(first) or bool(self._of(rest)))


def _declared(schema: dict[str, Any]) -> frozenset[str]:
    if "const" in schema or "enum" in schema:
        return _TYPES  # values are finite
    given = schema.get("type")
    names: Iterable[Any] = [given] if isinstance(given, str) else given if isinstance(given, list) else _TYPES
    return frozenset("number" if name == "integer" else name for name in names if isinstance(name, str))


def _count(value: Any) -> int:
    if isinstance(value, float) and not math.isfinite(value):
        return 0  # 1e999, which the compiler refuses
    return int(value) if isinstance(value, int | float) else 0
