"""Lark: how texts and schemas stand in it, and grammars that clients write in it or in llama.cpp's GBNF."""

from __future__ import annotations

import json
import re

from services.grammar.endless_grammar import check_ends
from services.grammar.grammar_error import GrammarError

# A schema may have options of llguidance (`x-guidance`), but none by which an output would not be valid.
STRICT = {"lenient": False, "coerce_one_of": False}
# Without a bound, models that are unsure write whitespace up to max_tokens.
DEFAULTS = {"whitespace_pattern": " "}

_NUL = re.compile(r"((?<!\\)(?:\\\\)*)\\0")  # an escape of GBNF that the converter does not know


def to_lark(text: str) -> str:
    """The grammar in Lark. Raises `GrammarError` for one that cannot be read, or that derives only endless texts."""
    from llguidance.gbnf_to_lark import any_to_lark

    if "::=" in text:
        text = _NUL.sub(r"\1\\x00", text)
    try:
        grammar = any_to_lark(text)
    except Exception as error:  # the converter raises plain ones
        raise GrammarError(str(error)) from error
    check_ends(grammar)
    return grammar


def quote(text: str) -> str:
    """A string literal of Lark; every character stands for itself."""
    return json.dumps(text, ensure_ascii=False)
