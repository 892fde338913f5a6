"""Structural tags: free text in which tags have a form, in both ways of writing them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from services.common.structured_output import Constraint, StructuredOutput
from services.grammar.grammar_error import GrammarError
from services.grammar.matcher import GrammarMatcher
from tests.support.dense.forms import EOS, TOOL, Forms, allowed, make_vocabulary

COUNT = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
CONTENT = {"type": "json_schema", "json_schema": COUNT}
CALL = {"begin": "<call=f>", "content": CONTENT, "end": "</call>"}
OTHER = {"begin": "<call=g>", "content": {"type": "const_string", "value": "1"}, "end": "</call>"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<call="], "tags": [CALL, OTHER]}
THINK = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
OLDER = {
    "structures": [{"begin": "<call=f>", "schema": COUNT, "end": "</call>"}],
    "triggers": ["<call="],
}
GOOD_CALL = '<call=f>{"n":7}</call>'
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (OLDER, ["", "text", f"a {GOOD_CALL} b {GOOD_CALL}", "a <cal"], ["<call=", "<call=h>", '<call=f>{"n":"7"}</call>']),
    ({"format": TRIGGERED}, ["text", GOOD_CALL, f"<call=g>1</call>{GOOD_CALL}x"], ["<call=g>2</call>"]),
    ({"format": TRIGGERED | {"at_least_one": True}}, [f"a{GOOD_CALL}", f"{GOOD_CALL}b"], ["", "text"]),
    (
        {"format": TRIGGERED | {"at_least_one": True, "stop_after_first": True}},
        [GOOD_CALL, f"a{GOOD_CALL}"],
        [f"{GOOD_CALL} ", "a"],
    ),
    ({"format": TRIGGERED | {"stop_after_first": True}}, ["", "a", f"a{GOOD_CALL}"], [f"{GOOD_CALL}a"]),
    (
        {"format": {"type": "sequence", "elements": [THINK, CONTENT]}},
        ['<think>so {"n"</think>{"n":1}', '<think></think>{"n": 1}'],
        ['{"n":1}', "<think>so</think>", "<think>so"],
    ),
    (
        {"format": {"type": "tags_with_separator", "tags": [CALL, OTHER], "separator": ", "}},
        ["", GOOD_CALL, f"{GOOD_CALL}, <call=g>1</call>"],
        [f"{GOOD_CALL}{GOOD_CALL}", f"{GOOD_CALL}, ", "text"],
    ),
    (
        {"format": {"type": "or", "elements": [{"type": "regex", "pattern": "[a/]+"}, CONTENT]}},
        ["a/a", '{"n":0}'],
        ["", "b", 'a{"n":0}'],
    ),
    (
        {"format": {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "const_string", "value": "END"},
                                                     CONTENT]}},
        ['some textEND{"n":1}', 'END{"n":1}'],
        ['text{"n":1}', "textENDx"],
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Forms:
    return Forms(make_vocabulary(tmp_path_factory.mktemp("tokenizer")))


def tag(value: dict[str, Any]) -> StructuredOutput:
    return StructuredOutput(Constraint.STRUCTURAL_TAG, json.dumps({"type": "structural_tag", **value}))


@pytest.mark.parametrize(("value", "good", "bad"), CASES)
def test_texts_of_a_structural_tag(forms: Forms, value: dict[str, Any], good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not forms.accepts(tag(value), text)] == []
    assert [text for text in bad if forms.accepts(tag(value), text)] == []


def test_a_special_token_is_meant_by_its_name(forms: Forms) -> None:
    call = CALL | {"begin": "<tool>f", "end": ["<tool>"]}
    called = {"type": "triggered_tags", "triggers": ["<tool>"], "tags": [call]}
    matcher = forms.matcher(tag({"format": called}))
    for token_id in (*forms.tokens("<tool>"), TOOL):  # its name in plain bytes is text
        assert allowed(matcher)[token_id]
        GrammarMatcher.consume([(matcher, token_id)])
    assert set(np.flatnonzero(allowed(matcher))) == set(forms.tokens("f"))
    matcher.sync([TOOL, *forms.tokenizer.tokenize_str('f{"n":1}'), TOOL])
    assert allowed(matcher)[EOS]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({}, "structures"),
        ({"format": {"type": "qwen_xml"}}, "qwen_xml"),
        ({"format": "text"}, "'text'"),
        ({"format": TRIGGERED | {"triggers": []}}, "no trigger"),
        ({"format": TRIGGERED | {"triggers": ["<x"]}}, "'<call=f>' has no trigger"),
        ({"format": TRIGGERED | {"tags": []}}, "at least one"),
        ({"format": CONTENT | {"json_schema": 5}}, "must be an object or true"),
        ({"format": {"type": "sequence", "elements": [{"type": "any_text"}, CONTENT]}}, "any_text"),
        ({"format": THINK | {"begin": 5}}, "begin .* must be a text"),
        ({"format": THINK | {"end": "x<tool>"}}, "must be its beginning"),
    ],
)
def test_what_is_no_structural_tag_is_refused(forms: Forms, value: dict[str, Any], words: str) -> None:
    with pytest.raises(GrammarError, match=words):
        forms.matcher(tag(value))


@pytest.mark.parametrize("text", ["{}", "[]", '"x"', "{", "[" * 100_000])
def test_what_is_not_even_a_tag_is_refused(forms: Forms, text: str) -> None:
    with pytest.raises(GrammarError, match="structural tag"):
        forms.matcher(StructuredOutput(Constraint.STRUCTURAL_TAG, text))


def test_formats_are_not_nested_without_a_bound(forms: Forms) -> None:
    value: dict[str, Any] = CONTENT
    for _ in range(40):
        value = {"type": "or", "elements": [value]}
    with pytest.raises(GrammarError, match="more than 32 deep"):
        forms.matcher(tag({"format": value}))
