"""Finds rules of Lark grammars that derive only endless texts, as `start: "a" start` does.

An answer that begins such a rule would only end at `max_tokens`. Reads only as much of Lark as this takes: which rules
every text of a rule contains, and which ones it may contain. Terminals cannot be recursive. A grammar with anything
that is not known here is left to llguidance.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator

from services.grammar.grammar_error import GrammarError

_TOKEN = re.compile(r"""
    (?P<space> [ \t\f\r]+ | //[^\n]* | \#[^\n]* )
  | (?P<line> \n )
  | (?P<json> %json\b )
  | (?P<option> %(?:ignore|import|llguidance)\b[^\n]* )
  | (?P<text> "(?:[^"\\\n]|\\.)*"i? | /(?:[^/\\\n]|\\.)+/[a-z]* | <[^>\n]*> )
  | (?P<rule> [?!]?[a-z_][a-z0-9_]* )
  | (?P<terminal> [A-Z][A-Z0-9_]* )
  | (?P<optional> [?*] | \{ \s* 0* \s* , \s* \d* \s* \} | \{ \s* 0+ \s* \} | ~ \s* 0+ \s* (?:\.\. \s* \d+)? (?!\d) )
  | (?P<repeated> \+ | \{ \s* \d+ \s* (?:,\s*\d*\s*)? \} | ~ \s* \d+ (?: \s* \.\. \s* \d+)? )
  | (?P<range> \.\. )
  | (?P<mark> [()\[\]|:] )
""", re.VERBOSE)  # fmt: skip
_ATTRIBUTES = re.compile(r"\[[^\]\n]*\]")  # of a rule, after its name

_Token = tuple[str, str]  # kind and text
_Rules = dict[str, list[list[str]]]  # for each rule its alternatives: names of the rules that each contains, ...
_OPTIONAL = "?"  # ... with this before those that it need not contain


def check_ends(grammar: str) -> None:
    """Raises `GrammarError` for a Lark grammar with a rule, reached from `start`, that has only endless texts."""
    rules = _read(list(_tokens(grammar)))
    ending, reached = _ending(rules), _reached(rules)
    endless = [name for name in rules if name in reached and name not in ending and name[0] != "("]
    if endless:
        raise GrammarError(f"only an endless text has this form: no text of the rule {endless[-1][:60]!r} ends")


def _reached(rules: _Rules) -> set[str]:
    """The rules that a text may contain, `start` included."""
    reached, open_ = set[str](), ["start"]
    while open_:
        name = open_.pop()
        if name in rules and name not in reached:
            reached.add(name)
            open_ += (each.lstrip(_OPTIONAL) for alternative in rules[name] for each in alternative)
    return reached


def _ending(rules: _Rules) -> set[str]:
    """The rules that derive a text, in time that grows with the number of names."""
    owners: list[str] = []  # the rule of each alternative
    num_missing: list[int] = []  # rules in each alternative that are not known to end
    users = defaultdict[str, list[int]](list)  # alternatives with a rule
    found: list[str] = []
    for name, alternatives in rules.items():
        for names in alternatives:
            needed = {each for each in names if each in rules}  # no optional ones
            for each in needed:
                users[each].append(len(owners))
            owners.append(name)
            num_missing.append(len(needed))
            if not needed:
                found.append(name)
    ending: set[str] = set()
    while found:
        name = found.pop()
        for alternative in users[name] if name not in ending else ():
            num_missing[alternative] -= 1
            if not num_missing[alternative]:
                found.append(owners[alternative])
        ending.add(name)
    return ending


def _tokens(grammar: str) -> Iterator[_Token]:
    """All but spaces; ends with `unknown` at the first thing that is not known."""
    at = 0
    while at < len(grammar):
        match = _TOKEN.match(grammar, at)
        if match is None:
            yield "unknown", grammar[at]
            return
        kind, at = str(match.lastgroup), match.end()
        if kind == "json":
            try:
                begin = re.compile(r"\s*").match(grammar, at)
                _, at = json.JSONDecoder().raw_decode(grammar, begin.end() if begin else at)
            except (ValueError, RecursionError):
                yield "unknown", match[0]
                return
        elif kind == "rule" and (attributes := _ATTRIBUTES.match(grammar, at)) is not None:
            at = attributes.end()
        if kind != "space":
            yield kind, match[0].lstrip("?!") if kind == "rule" else match[0]


def _read(tokens: list[_Token]) -> _Rules:
    """The rules; none if the grammar cannot be read. A group is a rule of its own, whose name begins with "("."""
    rules: _Rules = {}
    open_: list[list[list[str]]] = []  # alternatives of the rule and of the groups that are being read
    for i, (kind, text) in enumerate(tokens):
        if kind == "unknown":
            return {}
        if kind in ("rule", "terminal") and tokens[i + 1 : i + 2] == [("mark", ":")]:
            if len(open_) > 1:
                return {}
            open_ = [[[]]]
            rules.setdefault(text, open_[0])
        elif kind in ("line", "option", "range") or text == ":":
            continue
        elif not open_:
            return {}
        elif kind == "optional":
            if not open_[-1][-1]:
                return {}
            open_[-1][-1].append(_OPTIONAL + open_[-1][-1].pop())
        elif text == "|":
            open_[-1].append([])
        elif text in ("(", "["):
            open_.append([[]])
        elif text in (")", "]"):
            if len(open_) == 1:
                return {}
            name = f"({len(rules)}"
            rules[name] = open_.pop()
            open_[-1][-1].append(name if text == ")" else _OPTIONAL + name)
        elif kind != "repeated":
            open_[-1][-1].append(text if kind == "rule" else "")
    return rules
