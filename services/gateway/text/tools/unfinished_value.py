"""The beginnings of values in an answer that a limit cut off within a call, as beginnings of JSON texts."""

from __future__ import annotations

import json
import re

from services.gateway.text.tools.python_literal import literal_to_json

_TOKEN = re.compile(
    r"""
    \s*(?:
        "(?:[^"\\]|\\.)*(?:"|\\?\Z)   # a string, maybe without its end
        |'(?:[^'\\]|\\.)*(?:'|\\?\Z)
        |(?P<sign>[\[\](){},:])
        |[^\s"'\[\](){},:]+             # a number or a word
    )""",
    re.DOTALL | re.VERBOSE,
)
_SIGNS = {"(": "[", ")": "]", ",": ", ", ":": ": "}
_BEGIN_OF_NUMBER = re.compile(r"-?([0-9]+(\.[0-9]*)?([eE][+-]?[0-9]*)?)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}


def unfinished_to_json(text: str) -> str:
    """The beginning of the JSON text of a literal of Python or JSON whose end is missing.

    Anything else is taken for the beginning of a string, so that none of it is lost.
    """
    try:
        return _convert(text.lstrip())
    except ValueError:
        return json.dumps(text.strip(), ensure_ascii=False)[:-1]


def unfinished_string(text: str) -> str:
    """The JSON text of a string of Python or JSON without its end mark, which is missing; `text` has the first one.

    An escape that is not complete is left out. Raises `ValueError` if it is not the beginning of a string.
    """
    for _ in range(3):  # the last escape may be the second half of a character
        try:
            return literal_to_json(text + text[0])[:-1]
        except ValueError:
            text, backslash, _ = text.rpartition("\\")
            if not backslash:
                break
    raise ValueError("not the beginning of a string")


def _convert(text: str) -> str:
    written: list[str] = []
    position, comma = 0, ""
    may_follow = True  # whether a value may come next
    while text[position:].strip():
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError(f"unexpected {text[position]!r}")
        position, token = match.end(), match[0].lstrip()
        if match["sign"] and token != ",":
            written += ("" if token in ")]}" else comma, _SIGNS.get(token, token))
            comma, may_follow = "", token in "[({:"
        elif match["sign"]:
            comma, may_follow = _SIGNS[token], True  # written before the next value: it may be the last character
        elif not may_follow:
            raise ValueError("a value follows another one")
        else:
            written += (comma, _value(token, is_last=position == len(text)))
            comma, may_follow = "", False
    return "".join(written)


def _value(token: str, *, is_last: bool) -> str:
    if not is_last:
        return literal_to_json(token)
    if token[0] in "\"'":
        try:
            return literal_to_json(token)
        except ValueError:
            return unfinished_string(token)
    if _BEGIN_OF_NUMBER.fullmatch(token):
        return token
    for word, encoded in _WORDS.items():
        if word.startswith(token):
            return encoded[: len(token)]  # both have the same length
    raise ValueError(f"{token[:40]!r} begins no value")
