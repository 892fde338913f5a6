"""Ends a text where a regular expression matches: SGLang's `stop_regex`.

The gateway's event loop uses it, so no expression may take long: all of a request are one automaton that takes the text
character by character and never goes back (Thompson, "Regular expression search algorithm", CACM 1968). It has at most
`MAX_STATES` states, and remembers some of its moves. What needs more, such as references to groups, is refused.

No library among ours does this. `regex` finds where a partial match begins, but the text from there on may grow without
end (`a.*b`); two searches take it 6 to 49 us a token, this 1 to 8; one for `(a|aa)+b` took over a second in spite of
a timeout of 0.2 s. Expressions of llguidance have no `^`, `$` and word boundaries.
"""

from __future__ import annotations

import functools
import operator
import re
import warnings
from collections.abc import Callable, Sequence
from re import _casefix, _constants, _parser  # type: ignore[attr-defined]  # what `re` itself compiles from
from typing import Any, NamedTuple

from services.common.errors import InvalidRequest
from services.common.shorten import quote
from services.gateway.text.stop_strings import StopStrings

FIELD = "stop_regex"
MAX_STATES = 256  # of all expressions of a request; about one for each character, times how often it is repeated
MAX_BUILT = 1024  # alternatives and groups of them, with those that are empty
MAX_MOVES = 256  # remembered at a time, about 150 bytes each
NUM_CACHED = 16  # lists of expressions, kept for further answers with the same ones
LAST_NEWLINE = "\n$"  # in place of a "\n" with which the text so far ends: `$` matches before it
END = ""  # in place of a character: the end of the text so far


class StopPatterns:
    """Ends a text as soon as an expression matches anywhere in it, as `re.search` in all of the text so far would.

    What is fed at once is one token: `$` matches behind it. The token that completes a match is shown whole.
    """

    def __init__(self, patterns: Sequence[str], strings: StopStrings | None = None) -> None:
        """`strings`: end the text, too. Raises `InvalidRequest` for expressions that cannot be used."""
        self._automaton = automaton_of(tuple(patterns))
        self._strings = strings
        self._states, self._before = 0, END
        self._matched: str | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """Takes the next piece of text. Returns the text that can be shown now, and what ended it or None."""
        if self._matched is not None:
            return "", self._matched
        shown = text
        if self._strings is not None:
            shown, self._matched = self._strings.feed(text)
        if self._matched is None and text and (pattern := self._search(text)) is not None:
            self._matched = pattern
            shown += self.flush()
        return shown, self._matched

    def flush(self) -> str:
        """The text that was held back. Call it after the last piece."""
        return "" if self._strings is None else self._strings.flush()

    def _search(self, text: str) -> str | None:
        moves, find_move = self._automaton.moves, self._automaton.find_move
        states, before = self._states, self._before
        for character in (*text[:-1], LAST_NEWLINE if text[-1] == "\n" else text[-1]):
            key = states, before, character
            found, states, before = moves.get(key) or find_move(key)
            if found is not None:
                return found
        self._states, self._before = states, before
        key = states, before, END
        return (moves.get(key) or find_move(key)).found


def make_stops(
    stop: Sequence[str], patterns: Sequence[str], include_in_output: bool
) -> StopStrings | StopPatterns | None:
    """What ends a text; None: nothing. `include_in_output`: stop strings are shown, as what matches a pattern is."""
    strings = StopStrings(stop, include_in_output) if stop else None
    return StopPatterns(patterns, strings) if patterns else strings


_Test = Callable[[str], bool]


class Move(NamedTuple):
    """What a character does."""

    found: str | None  # the expression that has matched before it
    states: int  # a bit for each state that it leads to
    before: str  # the kind of this character, for what comes after it


class _State(NamedTuple):
    """A state has one of `takes`, `at` and `found`, or none: then all of `then` are reached with it."""

    then: list[int]
    takes: _Test | None = None  # whether it takes a character
    at: str | None = None  # the place that it takes
    found: str | None = None  # the expression that has matched


class _Automaton:
    """States of all expressions, and their moves. A text may begin to match before each of its characters.

    Sets of states are integers with a bit for each; those that are kept have all that are reached with them.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._states: list[_State] = []
        self.moves: dict[tuple[int, str, str], Move] = {}  # by states, what is before, and a character
        self._takers: dict[str, int] = {}  # by character: the states that take it
        self._tests: dict[tuple[Any, int, int], tuple[_Test, Any]] = {}  # by element and flags, with the element
        self._num_built = 0  # parts of expressions, repeated ones counted each time
        starts = []
        for pattern in patterns:
            try:
                with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of sets within sets
                    parsed = _parser.parse(pattern)
                end = self._add(_State([], found=pattern))
                starts.append(self._build(parsed, parsed.state.flags, end))
            except (re.error, OverflowError, RecursionError) as error:
                reason = str(error) if isinstance(error, re.error) else "it is nested too deep or repeats too often"
                raise InvalidRequest(f"{FIELD} has {quote(pattern)}: {reason}", FIELD) from None
            except _Unsupported as error:
                raise InvalidRequest(f"{FIELD} has {quote(pattern)}: {error}", FIELD) from None
        self._reached = self._find_reached()
        self._taking: dict[_Test, int] = {}  # by test: the states that have it
        for index, state in enumerate(self._states):
            if state.takes is not None:
                self._taking[state.takes] = self._taking.get(state.takes, 0) | 1 << index
        self._start = functools.reduce(operator.or_, [self._reached[index] for index in starts])
        self._after = self._find_after()
        self._places: dict[str, int] = {}  # by place: the states that take it
        for index, state in enumerate(self._states):
            if state.at is not None:
                self._places[state.at] = self._places.get(state.at, 0) | 1 << index
        self._ends = sum(1 << index for index, state in enumerate(self._states) if state.found is not None)

    def find_move(self, key: tuple[int, str, str]) -> Move:
        """Finds a move, and remembers it: a character, behind one of the kind `before`."""
        states, before, character = key
        kind, reached, next_states, found = _kind(character), states | self._start, 0, None
        passed = 0
        places = sum(bits for place, bits in self._places.items() if _is_at(place, before, kind))
        while index := (reached & places & ~passed).bit_length():
            passed |= 1 << index - 1
            reached |= self._reached[self._states[index - 1].then[0]]
        if ends := reached & self._ends:
            found = self._states[ends.bit_length() - 1].found
        takers = reached & self._find_takers(character[:1])
        for table in self._after:
            if not takers:
                break
            next_states |= table[takers & 15]
            takers >>= 4
        if len(self.moves) == MAX_MOVES:
            self.moves.clear()
        move = self.moves[key] = Move(found, next_states, kind)
        return move

    def _find_takers(self, character: str) -> int:
        if character == END:
            return 0
        if (takers := self._takers.get(character)) is None:
            if len(self._takers) == MAX_MOVES:
                self._takers.clear()
            takers = self._takers[character] = sum(bits for takes, bits in self._taking.items() if takes(character))
        return takers

    def _find_reached(self) -> list[int]:
        """For each state all that are reached with it, wherever it is (Warshall, "A theorem on Boolean matrices")."""
        reached, passing = [], []
        for index, state in enumerate(self._states):
            is_passing = state.takes is None and state.at is None
            reached.append(functools.reduce(operator.or_, [1 << each for each in state.then] * is_passing, 1 << index))
            passing += [index] * is_passing
        for middle in passing:
            bit, further = 1 << middle, reached[middle]
            for index in passing:
                if reached[index] & bit:
                    reached[index] |= further
        return reached

    def _find_after(self) -> list[list[int]]:
        """For every four states, and each of their 16 sets: what is reached when they take a character."""
        tables = []
        for first in range(0, len(self._states), 4):
            table = [0]
            for index in range(first, min(first + 4, len(self._states))):
                takes, then = self._states[index].takes, self._states[index].then
                after = 0 if takes is None else self._reached[then[0]]
                table += [each | after for each in table]
            tables.append(table)
        return tables

    def _add(self, state: _State) -> int:
        if len(self._states) == MAX_STATES:
            raise _Unsupported(f"{FIELD} may have {MAX_STATES} characters in all, repeated ones counted each time")
        self._states.append(state)
        return len(self._states) - 1

    def _build(self, items: Any, flags: int, then: int) -> int:
        """The first state of a sequence that goes on with `then`."""
        self._num_built += 1
        if self._num_built > MAX_BUILT:
            raise _Unsupported(f"it has more than {MAX_BUILT} alternatives and groups, repeated ones counted each time")
        for kind, value in reversed(list(items)):
            then = self._build_item(kind, value, flags, then)
        return then

    def _build_item(self, kind: Any, value: Any, flags: int, then: int) -> int:
        match kind:
            case _constants.LITERAL | _constants.NOT_LITERAL | _constants.ANY | _constants.IN:
                return self._add(_State([then], takes=self._test_of(kind, value, flags)))
            case _constants.AT:
                return self._add(_State([then], at=_place(value, flags)))
            case _constants.SUBPATTERN:
                _, added, removed, items = value
                return self._build(items, (flags | added) & ~removed, then)
            case _constants.BRANCH:
                firsts = [self._build(items, flags, then) for items in value[1]]
                return self._add(_State(list(dict.fromkeys(firsts))))  # of empty ones, one
            case _constants.MAX_REPEAT | _constants.MIN_REPEAT:
                return self._build_repeated(*value, flags, then)
        name = str(kind).lower().replace("_", " ")
        raise _Unsupported(f"{name} is not supported: no references, conditions, lookarounds or atomic groups")

    def _test_of(self, kind: Any, value: Any, flags: int) -> _Test:
        """That of an element that is repeated is made once, and then asked once for all its states."""
        key = kind, id(value), flags
        if key not in self._tests:
            self._tests[key] = _character(kind, value, flags), value
        return self._tests[key][0]

    def _build_repeated(self, least: int, most: int, items: Any, flags: int, then: int) -> int:
        first = end = then
        if most is _constants.MAXREPEAT:
            first = self._add(_State([end]))
            self._states[first].then.append(self._build(items, flags, first))
            most = least
        for number in range(int(most)):
            repeated = self._build(items, flags, first)
            if repeated == first:  # it is empty
                break
            first = repeated if number >= most - least else self._add(_State([repeated, end]))
        return first


automaton_of = functools.lru_cache(NUM_CACHED)(_Automaton)


class _Unsupported(Exception):
    """An expression is larger than it may be, or has what is not supported."""


def _character(kind: Any, value: Any, flags: int) -> _Test:
    """Whether a character is one that an element of an expression takes."""
    if kind is _constants.ANY:
        return (lambda character: True) if flags & re.DOTALL else (lambda character: character != "\n")
    items = value if kind is _constants.IN else [(kind, value)]
    is_negated = items[0][0] in (_constants.NEGATE, _constants.NOT_LITERAL)
    singles: set[int] = set()
    ranges: list[tuple[int, int]] = []
    categories: list[_Test] = []
    for part, each in items:
        match part:
            case _constants.LITERAL | _constants.NOT_LITERAL:
                singles.add(each)
            case _constants.RANGE:
                ranges.append(each)
            case _constants.CATEGORY:
                categories.append(_category(each, bool(flags & re.ASCII)))

    def takes(character: str) -> bool:
        codes = _cases(character, bool(flags & re.ASCII)) if flags & re.IGNORECASE else [ord(character)]
        is_one = any(code in singles for code in codes) or any(
            first <= code <= last for code in codes for first, last in ranges
        )
        return (is_one or any(test(character) for test in categories)) != is_negated

    return takes


def _cases(character: str, is_ascii: bool) -> list[int]:
    """The characters that mean the same as this one where case is ignored, as `re` has it."""
    if is_ascii and not character.isascii():
        return [ord(character)]
    lower = character.lower() if len(character.lower()) == 1 else character
    others = () if is_ascii else _casefix._EXTRA_CASES.get(ord(lower), ())
    forms = {form for each in (character, lower, *map(chr, others)) for form in (each, each.upper())}
    return [ord(form) for form in forms if len(form) == 1]


def _category(value: Any, is_ascii: bool) -> _Test:
    name = str(value).removeprefix("CATEGORY_").lower()
    is_one = {"digit": str.isdecimal, "space": str.isspace, "word": _is_word}[name.removeprefix("not_")]
    is_negated = name.startswith("not_")
    return lambda character: (is_one(character) and (character.isascii() or not is_ascii)) != is_negated


def _is_word(character: str) -> bool:
    return character == "_" or character.isalnum()


def _kind(character: str) -> str:
    """What of a character matters to the places beside it."""
    if character in (END, "\n", LAST_NEWLINE):
        return character
    return ("a" if character.isascii() else "w") if _is_word(character) else " "


def _place(value: Any, flags: int) -> str:
    """The name of a place, with what flags change of it."""
    name = str(value).removeprefix("AT_").lower()
    if name in ("beginning", "end") and flags & re.MULTILINE:
        name += "_line"
    return f"{name}_ascii" if "boundary" in name and flags & re.ASCII else name


def _is_at(place: str, before: str, after: str) -> bool:
    """Whether a place is between characters of these kinds."""
    match place:
        case "beginning" | "beginning_string":
            return before == END
        case "beginning_line":
            return before in (END, "\n", LAST_NEWLINE)
        case "end":
            return after in (END, LAST_NEWLINE)
        case "end_string":
            return after == END
        case "end_line":
            return after in (END, "\n", LAST_NEWLINE)
    words = "a" if place.endswith("_ascii") else "aw"
    is_boundary = (before != END and before in words) != (after != END and after in words)
    return is_boundary != place.startswith("non_")
