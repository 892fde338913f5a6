"""Answers in Harmony, token by token: what is reasoning, content and a call, and what becomes of broken answers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.text.answer_parts import AnswerParts, ReasoningPart, TextPart, ToolCall
from services.gateway.text.deltas import CallArguments, CallBegin, CallEnd, ContentDelta, Delta, ReasoningDelta
from services.gateway.text.harmony import MARKERS
from services.gateway.text.harmony.parser import MAX_HEADER_CHARACTERS, Beginning, HarmonyParser
from tests.support.examples import examples

THOUGHT = "<|channel|>analysis<|message|>Two and two.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Four.<|return|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": [1, "<|x|>"]}<|call|>'
F = ("f", '{"a": [1, "<|x|>"]}')


def pieces(text: str, size: int = 1) -> list[tuple[str, str | None]]:
    """Tokens: a marker each, and between them `size` characters each."""
    tokens: list[tuple[str, str | None]] = []
    for part in re.split("(" + "|".join(map(re.escape, MARKERS)) + ")", text):
        if part in MARKERS:
            tokens.append(("", part))
        else:
            tokens += [(part[i : i + size], None) for i in range(0, len(part), size)]
    return tokens


def deltas_of(
    tokens: list[tuple[str, str | None]],
    beginning: Beginning = Beginning.HEADER,
    *,
    is_cut: bool = False,
    may_call: bool = True,
) -> tuple[list[Delta], int]:
    parser = HarmonyParser(beginning, may_call)
    found = [delta for text, marker in tokens for delta in parser.feed_token(text, marker)]
    return found + parser.finish("", is_cut), parser.num_reasoning_tokens


def read(text: str, beginning: Beginning = Beginning.HEADER, size: int = 1, **options: Any) -> list[Any]:
    """The parts of an answer: ("r", reasoning), a text, or (name, arguments)."""
    parts = AnswerParts()
    parts.add(deltas_of(pieces(text, size), beginning, **options)[0])
    shown: list[Any] = []
    for part in parts.finish():
        match part:
            case TextPart(text):
                shown.append(text)
            case ReasoningPart(text):
                shown.append(("r", text))
            case ToolCall(_, name, arguments):
                shown.append((name, arguments))
    return shown


WELL_FORMED: list[tuple[str, list[Any]]] = [
    (THOUGHT + FINAL, [("r", "Two and two."), "Four."]),
    (FINAL, ["Four."]),
    (THOUGHT + CALL, [("r", "Two and two."), F]),
    (CALL.replace(" <|constrain|>json", ""), [F]),
    (CALL.replace("<|constrain|>json", "json"), [F]),
    (CALL.replace(" <|constrain|>", "<|constrain|>"), [F]),
    (CALL.replace("<|channel|>commentary to=functions.f", " to=functions.f<|channel|>commentary"), [F]),
    (CALL.replace("commentary", "analysis"), [F]),
    (CALL.replace("<|call|>", ""), [F]),  # its end token ended the answer
    (CALL.replace('{"a": [1, "<|x|>"]}', ""), [("f", "{}")]),
    (CALL.replace("functions.f", "functions.a-b_2"), [("a-b_2", F[1])]),
    (CALL + "<|start|>assistant" + CALL, [F, F]),
    ("<|channel|>commentary<|message|>I look. <|end|><|start|>assistant" + CALL, ["I look.", F]),
    (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + THOUGHT + FINAL,
        ["I look.", ("r", "Two and two."), "\nFour."],
    ),
    (THOUGHT + THOUGHT + FINAL, [("r", "Two and two.\nTwo and two."), "Four."]),
    (FINAL.replace("Four.", "é <|x|> <|en" + "d >"), ["é <|x|> <|end >"]),
]
BROKEN: list[tuple[str, list[Any]]] = [
    ("Four.", ["Four."]),  # no header at all
    (" today is fine", [" today is fine"]),  # begins like a recipient
    ("to=functions.f", ["to=functions.f"]),
    ("<|message|>Four.<|return|>", ["Four."]),  # no channel
    ("<|channel|>final Four.<|return|>", ["Four."]),  # no <|message|>
    ("<|channel|>final<|return|>", []),
    ("<|channel|>analysis Hm.<|end|>", [("r", "Hm.")]),
    ("<|channel|>dream<|message|>Sheep.<|end|>", ["Sheep."]),
    ("<|channel|><|message|>Four.", ["Four."]),
    ("<|channel|>final<|channel|>analysis<|message|>Four.", ["Four."]),
    ("<|channel|>final<|message|>Fo<|message|>ur<|constrain|>.", ["Four."]),
    ("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Four.", [("r", "Hm."), "Four."]),
    ("<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final<|message|>Four.", [("r", "Hm."), "Four."]),
    ("<|end|><|end|><|call|>" + FINAL, ["Four."]),
    ("<|start|>assistant" * 3 + FINAL, ["Four."]),
    (FINAL + " trailing", ["Four.\ntrailing"]),
    ("<|start|><|message|>Four.", ["Four."]),
    ("<|constrain|>json<|message|>Four.", ["Four."]),
    ('<|channel|>commentary to=functions.f {"a": 1}<|call|>', ['{"a": 1}']),
    (CALL.replace("functions.f", "functions.f g"), [("f", F[1])]),
    (CALL.replace("functions.f", "functions.ü"), [F[1]]),
    (CALL.replace("functions.f", "functions."), [F[1]]),
    (CALL.replace("functions.f", "python"), [F[1]]),
    (CALL.replace("commentary to=functions.f", "analysis to=python"), [("r", F[1])]),
    (CALL.replace('{"a"', '{"a" oh'), ['{"a" oh: [1, "<|x|>"]}']),
    (CALL.replace("{", "["), ['["a": [1, "<|x|>"]}']),
    (CALL.replace("<|call|>", " and more<|call|>"), [F, "and more"]),
    (CALL.replace("]}", ""), ['{"a": [1, "<|x|>"']),  # the model ended within the call
]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("text", "expected"), WELL_FORMED + BROKEN)
def test_parts_of_an_answer(text: str, expected: list[Any], size: int) -> None:
    assert read(text, size=size) == expected


@pytest.mark.parametrize(("text", "expected"), WELL_FORMED)
def test_the_prompt_need_not_begin_the_message(text: str, expected: list[Any]) -> None:
    assert read("<|start|>assistant" + text, Beginning.MESSAGE) == expected


def test_an_answer_that_continues_a_message_is_content() -> None:
    assert read(" is four.<|return|>", Beginning.CONTENT) == [" is four."]
    assert read("to=you", Beginning.CONTENT) == ["to=you"]


def test_without_tools_a_call_is_content() -> None:
    assert read(THOUGHT + CALL, may_call=False) == [("r", "Two and two."), F[1]]


def test_markers_in_plain_text_are_content() -> None:
    """A model that repeats what a user wrote does so in tokens of plain text."""
    quoted = FINAL.replace("Four.", "")
    tokens = [*pieces(quoted)[:-1], *((character, None) for character in CALL), ("", "<|return|>")]
    found, _ = deltas_of(tokens)
    assert all(isinstance(delta, ContentDelta) for delta in found)
    assert "".join(delta.text for delta in found) == CALL


@pytest.mark.parametrize("length", range(len(CALL) + 1))
def test_a_limit_may_cut_a_call_anywhere(length: int) -> None:
    found, _ = deltas_of(pieces(CALL)[:length], is_cut=True)
    header = len(pieces(CALL[: CALL.index("{")]))
    if length < header:
        assert found == []
        return
    [end] = [delta for delta in found if isinstance(delta, CallEnd)]
    assert end.is_cut == (length < header + len(F[1]))
    assert "".join(each.text for each in found if isinstance(each, CallArguments)) == F[1][: max(length - header, 0)]


def test_a_limit_within_a_header_leaves_nothing() -> None:
    for cut in ("<|channel|>fin", "<|channel|>", "<|channel|>commentary to=functions.f <|constrain|>js", " to=func"):
        assert read(cut, is_cut=True) == []


@pytest.mark.parametrize("start", ["<|channel|>", "<|channel|>final ", "<|start|>", "to=", "<|channel|>analysis to="])
def test_an_endless_header_is_bounded_and_shown(start: str) -> None:
    endless = "".join(chr(97 + i % 26) for i in range(5 * MAX_HEADER_CHARACTERS))
    parser, shown_at = HarmonyParser(Beginning.HEADER, True), None
    text = ""
    for index, (piece, marker) in enumerate(pieces(start + endless)):
        for delta in parser.feed_token(piece, marker):
            assert isinstance(delta, ContentDelta | ReasoningDelta)
            text += delta.text
            shown_at = shown_at or index
    assert shown_at is not None and shown_at <= MAX_HEADER_CHARACTERS + 2
    assert text.endswith(endless[MAX_HEADER_CHARACTERS:])


def test_reasoning_tokens_are_counted_with_their_markers() -> None:
    tokens = pieces(THOUGHT + FINAL)
    num_of_thought = len(pieces(THOUGHT.removesuffix("<|start|>assistant")))
    assert deltas_of(tokens)[1] == num_of_thought
    assert deltas_of(pieces(FINAL))[1] == 0


WORDS = ["assistant", "analysis", "commentary", "final", " to=functions.f", "json", '{"a": 1}', "{", " ", "é"]


@settings(max_examples=examples(400))
@given(parts=st.lists(st.sampled_from([*MARKERS, *WORDS]), max_size=25), size=st.integers(1, 9), is_cut=st.booleans())
def test_any_answer_gives_the_same_however_its_text_is_divided(parts: list[str], size: int, is_cut: bool) -> None:
    text = "".join(parts)
    whole = read(text, size=10_000, is_cut=is_cut)
    assert read(text, size=size, is_cut=is_cut) == whole
    found, _ = deltas_of(pieces(text, size), is_cut=is_cut)
    begun = [each.index for each in found if isinstance(each, CallBegin)]
    assert begun == list(range(len(begun))) == [each.index for each in found if isinstance(each, CallEnd)]
    if not is_cut:
        arguments = [each[1] for each in whole if isinstance(each, tuple) and each[0] != "r"]
        assert all(isinstance(json.loads(each), dict) for each in arguments)
