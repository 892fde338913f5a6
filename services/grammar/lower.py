"""Lowers a form to the text of an llguidance grammar: Lark, or JSON that holds Lark and JSON Schemas."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from services.common.structured_output import Constraint, StructuredOutput
from services.grammar.endless_schema import check_ends
from services.grammar.grammar_error import GrammarError
from services.grammar.lark import to_lark
from services.grammar.quote import DEFAULTS, STRICT, quote
from services.grammar.schema_dialect import translate
from services.grammar.structural_tag import lower_structural_tag, origin_of

_POSITION = re.compile(r"(?:at )?(\d+)\(\d+\): (?:failed to compile JSON schema: )?")  # in a grammar
_NO_TOKENS: Mapping[str, int] = MappingProxyType({})


def lower(form: StructuredOutput, special_tokens: Mapping[str, int] = _NO_TOKENS) -> str:
    """The grammar of a form. The grammar of a grammar that is lowered already is the same text.

    special_tokens: ids of the special tokens, by their texts

    Raises `GrammarError` for a text that cannot be read. Whether llguidance accepts the grammar is not known yet.
    """
    from llguidance import LLMatcher

    match form.constraint:
        case Constraint.JSON_SCHEMA:
            return _lower_schema(form.text)
        case Constraint.JSON_OBJECT:
            return _lower_schema('{"type": "object"}')
        case Constraint.REGEX:
            return LLMatcher.grammar_from_regex(form.text)
        case Constraint.CHOICE:
            # One terminal: its automaton is built as far as it is needed, whatever the number of texts.
            return "start: CHOICE\nCHOICE: " + " | ".join(map(quote, form.choices))
        case Constraint.STRUCTURAL_TAG:
            return lower_structural_tag(form.text, special_tokens)
        case Constraint.GRAMMAR:
            is_json = form.text.lstrip().startswith("{")  # llguidance's own
            return form.text if is_json else to_lark(form.text)


def locate(error: GrammarError, form: StructuredOutput, special_tokens: Mapping[str, int] = _NO_TOKENS) -> GrammarError:
    """An error of compiling a form's grammar, in terms of the form: the client has not seen the grammar."""
    position = _POSITION.match(str(error))
    if position is None or form.constraint is Constraint.GRAMMAR:
        return error
    is_tag = form.constraint is Constraint.STRUCTURAL_TAG
    origin = origin_of(form.text, special_tokens, int(position[1])) if is_tag else None
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
