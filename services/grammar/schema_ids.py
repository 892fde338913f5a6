"""Refuses schemas in which two subschemas have the same `$id`, so that a reference to it could mean either."""

from __future__ import annotations

from typing import Any
from urllib.parse import urljoin

from services.grammar.form_error import FormError

_VALUES = ("const", "enum", "default", "examples")  # of these keywords are no schemas


def check_ids(root: Any) -> None:
    """Raises `FormError` if two subschemas of a schema, wherever they stand, have the same `$id`."""
    seen: set[str] = set()
    open_ = [(root, "")]  # with the URI that relative ones are resolved against
    while open_:
        value, base = open_.pop()
        if isinstance(value, list):
            open_ += [(each, base) for each in value]
        elif isinstance(value, dict):
            if isinstance(value.get("$id"), str):
                base = _resolve(base, value["$id"])
                if base in seen:
                    raise FormError(f"two subschemas have the $id {base[:100]!r}")
                seen.add(base)
            open_ += [(each, base) for key, each in value.items() if key not in _VALUES]


def _resolve(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference.removesuffix("#"))
    except ValueError as error:
        raise FormError(f"$id {reference[:100]!r} is not a URI: {error}") from error
