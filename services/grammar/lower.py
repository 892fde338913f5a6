"""Lowers structured output to the text of an llguidance grammar: Lark, or JSON that holds Lark and JSON Schemas."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from services.common.structured_output import Constraint, StructuredOutput
from services.grammar.endless_schema import check_ends
from services.grammar.grammar_error import GrammarError
from services.grammar.lark import DEFAULTS, STRICT, quote, to_lark
from services.grammar.schema_dialect import translate
from services.grammar.structural_tag import lower_structural_tag, origin_of

_POSITION = re.compile(r"(?:at )?(\d+)\(\d+\): (?:failed to compile JSON schema: )?")  # in a grammar
_NO_TOKENS: Mapping[str, int] = MappingProxyType({})


def lower(structure: StructuredOutput, special_tokens: Mapping[str, int] = _NO_TOKENS) -> str:
    """The grammar of a structured output. That of one that is lowered already is the same text.

    special_tokens: ids of the special tokens, by their texts

    Raises `GrammarError` for a text that cannot be read. Whether llguidance accepts the grammar is not known yet.
    """
    from llguidance import LLMatcher

    match structure.constraint:
        case Constraint.JSON_SCHEMA:
            return _lower_schema(structure.text)
        case Constraint.JSON_OBJECT:
            return _lower_schema('{"type": "object"}')
        case Constraint.REGEX:
            return LLMatcher.grammar_from_regex(structure.text)
        case Constraint.CHOICE:
            # One terminal: its automaton is built as far as it is needed, whatever the number of texts.
            return "start: CHOICE\nCHOICE: " + " | ".join(map(quote, structure.choices))
        case Constraint.STRUCTURAL_TAG:
            return lower_structural_tag(structure.text, special_tokens)
        case Constraint.GRAMMAR:
            is_json = structure.text.lstrip().startswith("{")  # llguidance's own
            return structure.text if is_json else to_lark(structure.text)


def locate(
    error: GrammarError, structure: StructuredOutput, special_tokens: Mapping[str, int]
) -> GrammarError:
    """An error of compiling a grammar, in terms of what the client has asked for: it has not seen the grammar."""
    position = _POSITION.match(str(error))
    if position is None or structure.constraint is Constraint.GRAMMAR:
        return error
    is_tag = structure.constraint is Constraint.STRUCTURAL_TAG
    origin = origin_of(structure.text, special_tokens, int(position[1])) if is_tag else None
    return GrammarError(str(error)[position.end() :], origin)


def _lower_schema(text: str) -> str:
    from llguidance import LLMatcher

    if text.strip() == "false":
        raise GrammarError("nothing is valid against the schema false")
    text = "{}" if text.strip() == "true" else text
    text = translate(text)
    check_ends(text)
    try:
        return LLMatcher.grammar_from_json_schema(text, defaults=DEFAULTS, overrides=STRICT)
    except ValueError as error:
        raise GrammarError(str(error)) from error
