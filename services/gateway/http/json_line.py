"""JSON that is a single line to every reader of lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic_core import to_json

# U+0085, U+2028 and U+2029 end a line for `str.splitlines`, and for clients that read an answer with it (httpx's
# `iter_lines`), but neither in JSON (RFC 8259) nor in event streams (HTML standard).
_ENDS_OF_LINES = ((b"\xc2\x85", rb"\u0085"), (b"\xe2\x80\xa8", rb"\u2028"), (b"\xe2\x80\xa9", rb"\u2029"))


def json_line(value: Any, *, fallback: Callable[[Any], Any] | None = None) -> bytes:
    """The JSON of `value`, with what ends a line for some readers escaped. `fallback`: see `to_json`."""
    encoded = to_json(value, fallback=fallback)
    if not encoded.isascii():
        for end, escaped in _ENDS_OF_LINES:
            encoded = encoded.replace(end, escaped)
    return encoded
