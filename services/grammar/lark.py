"""Context-free grammars, which clients write in Lark or in llama.cpp's GBNF, as Lark."""

from __future__ import annotations

import re

from services.grammar.endless_grammar import check_ends
from services.grammar.grammar_error import GrammarError

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
