"""Schemas with a part that only an endless text satisfies are refused; recursion that can end is not."""

from __future__ import annotations

import contextlib
import json
import random
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.structured_output import Constraint, StructuredOutput
from services.grammar.endless_schema import check_ends
from services.grammar.grammar_error import GrammarError
from services.grammar.lower import lower
from tests.support.dense.forms import Forms, make_vocabulary
from tests.support.examples import examples

SELF = {"$ref": "#"}


def definitions(start: str, **defs: Any) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{start}", "$defs": defs}


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


def node(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def items(of: Any, at_least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": of, "minItems": at_least}


NULL = {"type": "null"}
ENDLESS: dict[str, Any] = {
    "an object that requires itself": node(a=SELF),
    "an array of at least one of itself": items(SELF, 1),
    "a pair with itself": {"type": "array", "prefixItems": [NULL, SELF], "minItems": 2},
    "a pair with itself, in an older draft": {"type": "array", "items": [NULL, SELF], "minItems": 2},
    "two that require one another": definitions("a", a=node(b=ref("b")), b=node(a=ref("a"))),
    "a list without an end": definitions("n", n=node(value={"type": "integer"}, next=ref("n"))),
    "no way out of two": {"anyOf": [node(a=SELF), items(SELF, 2)]},
    "a required property of the others": {"type": "object", "required": ["x"], "additionalProperties": SELF},
    "a required property of a pattern": {"type": "object", "required": ["x1"], "patternProperties": {"^x": SELF}},
    "at least one other property": {"type": "object", "minProperties": 1, "additionalProperties": SELF},
    "an object by its conjunction": {"type": "object", "allOf": [{"required": ["a"], "properties": {"a": SELF}}]},
    "null or itself, and no null": {"type": "object", "allOf": [{"anyOf": [NULL, node(a=SELF)]}]},
    "only a reference to itself": definitions("a", a=ref("a")),
    "an optional property": {"properties": {"a": ref("x")}, "$defs": {"x": node(x=ref("x"))}},
    "one of two": definitions("a", a={"anyOf": [NULL, ref("x")]}, x=items(ref("x"), 1)),
    "further items": {"type": "array", "prefixItems": [NULL], "items": ref("x"), "$defs": {"x": node(x=ref("x"))}},
    "a type of two": definitions("x", x=node(x=ref("y")) | {"type": ["object", "null"]}, y=node(y=ref("y"))),
    "a name with escapes": {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": node(a={"$ref": "#/$defs/a~1b%25"})}},
}
ENDING: dict[str, Any] = {
    "a linked list": definitions("n", n=node(value={"type": "integer"}, next={"anyOf": [NULL, ref("n")]})),
    "a linked list by types": definitions("n", n=node(next=ref("n")) | {"type": ["object", "null"]}),
    "a tree with an array of children": definitions("t", t=node(name={"type": "string"}, children=items(ref("t")))),
    "a tree with optional children": definitions("t", t={"type": "object", "properties": {"left": ref("t")}}),
    "an expression": definitions("e", e={"anyOf": [{"type": "number"}, node(left=ref("e"), op={"enum": ["+", "-"]})]}),
    "two that name one another": definitions("a", a=node(b=ref("b")), b=items(ref("a"))),
    "a map of itself": {"type": "object", "additionalProperties": SELF},
    "a part that nobody names": definitions("a", a={"type": "string"}, endless=node(x=ref("endless"))),
    "an optional part that has no value": {"type": "object", "properties": {"a": ref("x")}, "$defs": {"x": False}},
    "one of two that has no value": {"anyOf": [NULL, node(a=ref("x"))], "$defs": {"x": {"anyOf": [False]}}},
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_a_schema_with_a_part_that_only_an_endless_text_satisfies_is_refused(name: str) -> None:
    for form in (
        StructuredOutput(Constraint.JSON_SCHEMA, json.dumps(ENDLESS[name])),
        StructuredOutput(Constraint.STRUCTURAL_TAG, json.dumps(
            {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": ENDLESS[name]}})),
    ):  # fmt: skip
        with pytest.raises(GrammarError, match=r"^only an endless text is valid against .*\$ref.*: it requires itself"):
            lower(form)


@pytest.mark.parametrize("name", ENDING)
def test_recursion_that_can_end_is_accepted(name: str) -> None:
    lower(StructuredOutput(Constraint.JSON_SCHEMA, json.dumps(ENDING[name])))


def test_what_is_not_a_schema_is_left_to_the_compiler() -> None:
    for text in ('{"$ref": 5}', '["$ref"]', '{"$ref": "#/x", "required": 5, "minItems": "a"}', '{"$ref"', '"$ref"'):
        check_ends(text)
    check_ends('{"a":' * 50_000 + '{"$ref": "#"}')


def test_keywords_may_be_written_with_escapes() -> None:
    for name in ("an object that requires itself", "two that require one another"):
        text = json.dumps(ENDLESS[name]).replace("$ref", "\\u0024ref")
        with pytest.raises(GrammarError, match=r"^only an endless text"):
            check_ends(text)
    with pytest.raises(GrammarError, match=r"^two subschemas have the"):
        lower(StructuredOutput(Constraint.JSON_SCHEMA, r'{"\u0024id": "a", "items": {"\u0024id": "a"}}'))


def test_a_long_chain_of_references_takes_no_longer_than_to_read_it() -> None:
    chain = {f"d{i}": node(x=ref(f"d{i + 1}")) for i in range(2_000)} | {"d2000": NULL}
    check_ends(json.dumps(definitions("d0", **chain)))
    with pytest.raises(GrammarError):
        check_ends(json.dumps(definitions("d0", **chain | {"d2000": ref("d7")})))


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Forms:
    return Forms(make_vocabulary(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize(
    "keywords",
    [
        '"properties": {"a": {}}, "required": [["a"]]',
        '"properties": {"a": {}}, "required": [{}]',
        '"patternProperties": {"a{4294967296}": {}}, "required": ["a"]',
        '"additionalProperties": false, "minProperties": 1e999',
    ],
)
def test_keywords_that_no_compiler_takes_are_left_to_it(forms: Forms, keywords: str) -> None:
    text = '{"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", KEYWORDS}}}'.replace("KEYWORDS", keywords)
    check_ends(text)
    with pytest.raises(GrammarError):
        forms.matcher(StructuredOutput(Constraint.JSON_SCHEMA, text))


def test_a_pattern_that_never_ends_is_given_up() -> None:
    rules = {"type": "object", "patternProperties": {"^(a+)+$": {}}, "required": ["a" * 60 + "!"]}
    check_ends(json.dumps({"$ref": "#/$defs/a", "$defs": {"a": rules}}))


SYSTEMS = st.fixed_dictionaries({
    name: st.recursive(
        st.sampled_from([NULL, {"type": "boolean"}, ref("a"), ref("b"), ref("c")]),
        lambda inner: st.one_of(
            st.builds(lambda x: node(x=x), inner),
            st.builds(items, inner, st.integers(0, 1)),
            st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=2)),
            st.builds(lambda x: {"type": "object", "properties": {"y": x}, "additionalProperties": False}, inner),
        ),
        max_leaves=4,
    )
    for name in "abc"
})  # fmt: skip


def named(schema: Any, defs: dict[str, Any]) -> set[str]:
    """The definitions that it names, directly or not."""
    found, more = set[str](), set(re.findall(r"\$defs/(.)", json.dumps(schema)))
    while more:
        found |= more
        more = set(re.findall(r"\$defs/(.)", json.dumps([defs[name] for name in found]))) - found
    return found


def has_value(schema: Any, defs: dict[str, Any], depth: int) -> bool:
    """Whether it has a value of at most this depth, by trying."""
    if depth == 0:
        return False
    if "$ref" in schema:
        return has_value(defs[schema["$ref"][-1]], defs, depth - 1)
    if "anyOf" in schema:
        return any(has_value(each, defs, depth - 1) for each in schema["anyOf"])
    if schema["type"] == "object":
        return all(has_value(schema["properties"][name], defs, depth - 1) for name in schema.get("required", ()))
    return schema["type"] != "array" or schema["minItems"] == 0 or has_value(schema["items"], defs, depth - 1)


@settings(deadline=None, max_examples=examples(60))
@given(defs=SYSTEMS, seed=st.integers(0, 2**32))
def test_what_is_refused_has_a_part_without_a_value_and_what_ends_is_valid(
    forms: Forms, defs: dict[str, Any], seed: int
) -> None:
    value = definitions("a", **defs)
    ends = all(has_value(ref(name), defs, 12) for name in named(ref("a"), defs))  # no simple way is longer
    try:
        matcher = forms.matcher(StructuredOutput(Constraint.JSON_SCHEMA, json.dumps(value)))
    except GrammarError as error:
        assert not ends or "endless" not in str(error), value
        return
    assert ends, value
    output = forms.walk(matcher, random.Random(seed), 60)
    if matcher.is_complete:
        # The validator does not end where a definition is one of its own alternatives; it cannot judge these answers.
        with contextlib.suppress(RecursionError):
            jsonschema.validate(json.loads(forms.text(output)), value, jsonschema.Draft202012Validator)
