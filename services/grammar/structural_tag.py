"""Lowers a structural tag, JSON as vLLM and xgrammar define it, to Lark.

    {"type": "structural_tag", "format": FORMAT}
    {"type": "structural_tag", "structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}    (the older form)

Free text is lexed lazily: it ends where a trigger, or the end of its tag, first appears. A format may have an `origin`,
the name that errors within it have: tools have it, whose schemas the gateway combines to one tag.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from services.grammar.endless_schema import check_ends
from services.grammar.grammar_error import GrammarError
from services.grammar.lark import DEFAULTS, STRICT, quote, to_lark
from services.grammar.schema_dialect import translate

MAX_DEPTH = 32  # of formats in formats
_TEXT = r"/(.|\n)*/"


def lower_structural_tag(text: str, special_tokens: Mapping[str, int]) -> str:
    """The Lark grammar. Raises `GrammarError` for JSON that is no structural tag, or has a format that is unknown.

    Where a text of the tag names a special token, only this token matches, by its id.
    """
    return "\n".join(_rules(text, special_tokens).lines)


def origin_of(text: str, special_tokens: Mapping[str, int], line: int) -> str | None:
    """The origin of what became this line of the grammar; the first line is 1. None if it has none."""
    origins = _rules(text, special_tokens).origins
    return origins[line - 1] if 1 <= line <= len(origins) else None


def _rules(text: str, special_tokens: Mapping[str, int]) -> _Rules:
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the structural tag is not JSON: {error}") from error
    if not isinstance(tag, dict) or tag.get("type") != "structural_tag":
        raise GrammarError('a structural tag is an object with "type": "structural_tag"')
    rules = _Rules(special_tokens)
    rules.add_start(tag)
    return rules


def _newer_format(tag: dict[str, Any]) -> dict[str, Any]:
    """The format that the older form means."""
    tags = [
        {
            "begin": _text(each, "begin"),
            "content": {"type": "json_schema", "json_schema": each.get("schema", {})},
            "end": _text(each, "end"),
        }
        for each in _objects(tag, "structures")
    ]
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


class _Rules:
    """The rules made so far. Each method returns an expression, which may name them."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special_tokens = special_tokens
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self.lines = ["%llguidance {}", f"TEXT: {_TEXT}"]  # of the grammar
        self.origins: list[str | None] = [None, None]  # of these lines
        self._origin: str | None = None
        self._depth = 0

    def add_start(self, format_: Any) -> None:
        """Completes the grammar by its start."""
        self.lines += [f"start: {self._expression(format_)}", ""]

    def _expression(self, format_: Any) -> str:
        kind = format_.get("type") if isinstance(format_, dict) else format_
        if not isinstance(kind, str) or kind not in _FORMATS:
            raise GrammarError(f"the structural tag has the format {str(kind)[:60]!r}, known are {', '.join(_FORMATS)}")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise GrammarError(f"the formats of the structural tag are nested more than {MAX_DEPTH} deep")
        before, origin = self._origin, format_.get("origin")
        self._origin = origin if isinstance(origin, str) else before
        try:
            expression = _FORMATS[kind](self, format_)
        except GrammarError as error:
            raise GrammarError(str(error), error.origin or self._origin) from error
        self._origin = before
        self._depth -= 1
        return expression

    def _rule(self, body: str, kind: str = "rule", attribute: str = "") -> str:
        name = f"{kind}_{len(self.lines)}"
        self.lines.append(f"{name}{attribute}: {body}")
        self.origins.append(self._origin)
        return name

    def _literal(self, text: str) -> str:
        """The text; special tokens in it by their ids."""
        parts, at = [], 0
        for match in self._special.finditer(text) if self._special else ():
            parts += [quote(text[at : match.start()])] * (match.start() > at)
            parts.append(f"<[{self._special_tokens[match[0]]}]>")
            at = match.end()
        if text[at:] or not parts:
            parts.append(quote(text[at:]))
        return " ".join(parts)

    def _text_up_to(self, end: str) -> str:
        """Free text, and then `end` at its first appearance. Free text has no special tokens."""
        match = self._special.search(end) if self._special else None
        if match is None:
            return self._rule(f"TEXT {quote(end)}", "text", "[lazy]")
        if match.start() > 0:
            raise GrammarError(f"{end[:60]!r} ends free text, so the special token {match[0]!r} must be its beginning")
        return f"TEXT {self._literal(end)}"

    def structural_tag(self, format_: dict[str, Any]) -> str:
        """A whole tag, also within others."""
        return self._expression(format_["format"] if "format" in format_ else _newer_format(format_))

    def const_string(self, format_: dict[str, Any]) -> str:
        return self._literal(_text(format_, "value"))

    def json_schema(self, format_: dict[str, Any]) -> str:
        schema = format_.get("json_schema")
        schema = {} if schema is True else schema
        if not isinstance(schema, dict):
            raise GrammarError("the schema of a structural tag must be an object or true")
        options = schema.get("x-guidance")
        schema = {**schema, "x-guidance": {**DEFAULTS, **(options if isinstance(options, dict) else {}), **STRICT}}
        text = translate(json.dumps(schema, ensure_ascii=False))
        check_ends(text)
        return self._rule(f"%json {text}", "json")

    def regex(self, format_: dict[str, Any]) -> str:
        from llguidance import regex_to_lark

        return self._rule(f"/{regex_to_lark(_text(format_, 'pattern'), '')}/", "REGEX")

    def grammar(self, format_: dict[str, Any]) -> str:
        text = _text(format_, "grammar")
        if text.lstrip().startswith("{"):
            raise GrammarError("a grammar of llguidance in JSON cannot be a part of a structural tag")
        first, *others = f"%lark {{\n{to_lark(text)}\n}}".split("\n")
        name = self._rule(first, "grammar")
        self.lines += others
        self.origins += [self._origin] * len(others)
        return name

    def any_text(self, format_: dict[str, Any]) -> str:
        return "TEXT"

    def sequence(self, format_: dict[str, Any]) -> str:
        elements, parts = _objects(format_, "elements"), list[str]()
        is_in_text = False  # the element before is free text, which ends with this one
        for index, element in enumerate(elements):
            if is_in_text:
                if element.get("type") != "const_string":
                    raise GrammarError("any_text in a sequence must be its last element, or precede a const_string")
                parts.append(self._text_up_to(_text(element, "value")))
                is_in_text = False
            elif element.get("type") == "any_text" and index + 1 < len(elements):
                is_in_text = True
            else:
                parts.append(self._expression(element))
        return self._rule(" ".join(parts) or '""')

    def either(self, format_: dict[str, Any]) -> str:
        elements = _objects(format_, "elements")
        if not elements:
            raise GrammarError("elements of the format or is empty, must have at least one")
        return self._rule(" | ".join(map(self._expression, elements)))

    def tag(self, format_: dict[str, Any]) -> str:
        return self._tag(format_, _text(format_, "begin"))

    def _tag(self, tag: dict[str, Any], begin: str) -> str:
        end, content = _text(tag, "end"), tag.get("content")
        opening = f"{self._literal(begin)} " if begin else ""
        if isinstance(content, dict) and content.get("type") == "any_text" and end:
            return self._rule(f"{opening}{self._text_up_to(end)}")
        return self._rule(f"{opening}{self._expression(content)}{f' {self._literal(end)}' if end else ''}")

    def triggered_tags(self, format_: dict[str, Any]) -> str:
        """Free text with tags in it. Where a trigger appears, one of its tags begins."""
        triggers, tags = format_.get("triggers"), _objects(format_, "tags")
        if not isinstance(triggers, list) or not all(isinstance(each, str) and each for each in triggers):
            raise GrammarError("the triggers of a structural tag must be a list of texts, none of them empty")
        by_trigger: dict[str, list[str]] = {}
        for tag in tags:
            begin = _text(tag, "begin")
            trigger = next((each for each in triggers if begin.startswith(each)), None)
            if trigger is None:
                raise GrammarError(f"the tag that begins with {begin[:60]!r} has no trigger")
            by_trigger.setdefault(trigger, []).append(self._tag(tag, begin.removeprefix(trigger)))
        if not by_trigger:
            raise GrammarError("the structural tag has no tags, must have at least one")
        options = [f"{self._text_up_to(trigger)} ({' | '.join(rules)})" for trigger, rules in by_trigger.items()]
        tagged, at_least_one = self._rule(" | ".join(options)), bool(format_.get("at_least_one"))
        if format_.get("stop_after_first"):
            return self._rule(tagged if at_least_one else f"{tagged} | TEXT")
        return self._rule(f"{tagged}{'+' if at_least_one else '*'} TEXT")

    def tags_with_separator(self, format_: dict[str, Any]) -> str:
        """Tags with nothing but a separator between them."""
        tags = _objects(format_, "tags")
        if not tags:
            raise GrammarError("the tags of a structural tag are empty, must have at least one")
        one = self._rule(" | ".join(map(self.tag, tags)))
        more = "" if format_.get("stop_after_first") else f" ({self._literal(_text(format_, 'separator'))} {one})*"
        several = self._rule(f"{one}{more}")
        return several if format_.get("at_least_one") else f"{several}?"


_FORMATS: dict[str, Callable[[_Rules, dict[str, Any]], str]] = {
    "structural_tag": _Rules.structural_tag,
    "grammar": _Rules.grammar,
    "const_string": _Rules.const_string,
    "json_schema": _Rules.json_schema,
    "regex": _Rules.regex,
    "any_text": _Rules.any_text,
    "sequence": _Rules.sequence,
    "or": _Rules.either,
    "tag": _Rules.tag,
    "triggered_tags": _Rules.triggered_tags,
    "tags_with_separator": _Rules.tags_with_separator,
}


def _text(parent: dict[str, Any], key: str) -> str:
    value = parent.get(key, "")
    if isinstance(value, list) and len(value) == 1:
        value = value[0]  # xgrammar allows several ends of a tag
    if not isinstance(value, str):
        raise GrammarError(f"{key} in the structural tag must be a text")
    return value


def _objects(parent: dict[str, Any], key: str) -> list[dict[str, Any]]:
    values = parent.get(key)
    if not isinstance(values, list) or not all(isinstance(each, dict) for each in values):
        raise GrammarError(f"{key} in the structural tag must be a list of objects")
    return values
