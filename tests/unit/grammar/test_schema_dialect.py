"""What llguidance reads differently from JSON Schema: what it accepts is valid by `jsonschema` and the calendar."""

from __future__ import annotations

import datetime
import itertools
import json
import re
from typing import Any

import jsonschema
import pytest

from services.common.structured_output import Constraint, StructuredOutput
from services.grammar.grammar_error import GrammarError
from services.grammar.schema_dialect import translate
from tests.support.dense.forms import Forms, make_vocabulary


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Forms:
    return Forms(make_vocabulary(tmp_path_factory.mktemp("tokenizer")))


def schema(value: Any) -> StructuredOutput:
    return StructuredOutput(Constraint.JSON_SCHEMA, json.dumps(value))


def pattern_of(name: str) -> re.Pattern[str]:
    return re.compile(json.loads(translate(json.dumps({"format": name})))["allOf"][0]["pattern"])


def is_date(year: int, month: int, day: int) -> bool:
    try:
        datetime.date(year, month, day)
    except ValueError:
        return False
    return True


def test_dates_are_those_of_the_calendar() -> None:
    pattern = pattern_of("date")
    years = [0, 1, 4, 5, 10, 99, 100, 104, 400, 999, 1000, 1600, 1900, 1996, 2000, 2023, 2024, 2026, 2100, 9996, 9999]
    for year, month, day in itertools.product(years, range(14), range(33)):
        text = f"{year:04}-{month:02}-{day:02}"
        assert bool(pattern.match(text)) == is_date(year, month, day), text
    for year in range(1, 10_000):
        assert bool(pattern.match(f"{year:04}-02-29")) == is_date(year, 2, 29), year


def test_times_are_those_of_rfc_3339_without_leap_seconds() -> None:
    pattern = pattern_of("time")
    for text in ("00:00:00Z", "23:59:59.123456789+23:59", "08:30:06.283185-08:00", "12:00:00+00:00"):
        assert pattern.match(text), text
        assert datetime.datetime.fromisoformat(f"2026-01-01T{text}").tzinfo is not None, text
    for text in ("23:59:60Z", "24:00:00Z", "12:60:00Z", "12:00:00", "12:00:00+24:00", "12:00:00+10:60", "1:00:00Z",
                 "12:00Z", "12:00:00.Z", "12:00:00+1000", "12:00:00 Z"):  # fmt: skip
        assert not pattern.match(text), text


def test_a_format_keeps_the_rules_beside_it(forms: Forms) -> None:
    form = schema({"type": "string", "format": "date", "pattern": "^20", "allOf": [{"maxLength": 10}]})
    assert forms.accepts(form, '"2024-02-29"')
    assert not forms.accepts(form, '"2023-02-29"')
    assert not forms.accepts(form, '"1999-01-01"')
    optional = schema({"type": ["string", "null"], "format": "date-time"})
    assert forms.accepts(optional, "null") and forms.accepts(optional, '"2024-02-29T23:59:59Z"')
    assert not forms.accepts(optional, '"2024-02-30T23:59:59Z"')


MIXED: list[dict[str, Any]] = [
    {"type": "array", "prefixItems": [{"type": "string"}, {"type": "null"}], "additionalItems": False},
    {"type": "array", "prefixItems": [{"type": "string"}], "additionalItems": {"type": "null"}, "minItems": 1.0},
    {"type": "array", "prefixItems": [{"type": "string"}], "additionalItems": False, "items": {"type": "null"}},
    {"$ref": "#/here/it", "here": {"it": {"type": "array", "maxItems": 2.0, "items": {"type": "null"}}}},
]


@pytest.mark.parametrize("value", MIXED)
def test_arrays_of_mixed_drafts_have_valid_items(forms: Forms, value: dict[str, Any]) -> None:
    texts = ["[]", "[0]", '["a"]', '["a",null]', "[null]", '["a","b"]', '["a",null,null]', "[null,null,null]"]
    accepted = [text for text in texts if forms.accepts(schema(value), text)]
    valid = [text for text in texts if jsonschema.Draft202012Validator(value).is_valid(json.loads(text))]
    assert accepted and set(accepted) <= set(valid)
    assert set(valid) - set(accepted) <= {'["a","b"]', '["a",null,null]'}, "they break what is meant"


def test_other_schemas_stay_as_they_are_written() -> None:
    constant = {"properties": {"format": {"const": {"format": "date", "minItems": 1.0}}}}
    for value in (constant, {"minLength": 2.5}, [], 5):
        text = json.dumps(value, indent=1)
        assert translate(text) is text
    for text in ("{", '{"maxItems": 1e400}', '"\\ud800"'):
        assert translate(text) is text


def test_alternatives_that_may_overlap_are_refused_with_advice(forms: Forms) -> None:
    with pytest.raises(GrammarError, match=r"^oneOf can be enforced only where .* try anyOf$"):
        forms.matcher(schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}))
    tagged = [{"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in "ab"]
    assert forms.accepts(schema({"oneOf": tagged}), '{"kind":"b"}')


def test_gbnf_may_name_the_character_zero(forms: Forms) -> None:
    form = StructuredOutput(Constraint.GRAMMAR, 'root ::= "\\"" [^\\0-\\x1f"\\\\]* "\\"" "\\\\0"')
    assert forms.accepts(form, '"ab"\\0')
    assert not forms.accepts(form, '"a\nb"\\0') and not forms.accepts(form, '"ab"\0')


def test_formats_that_json_schema_does_not_define_only_describe(forms: Forms) -> None:
    form = schema({"type": "object", "properties": {"a": {"type": "string", "format": "byte"}}, "required": ["a"]})
    assert forms.accepts(form, '{"a":"any text"}') and not forms.accepts(form, '{"a":1}')
    assert forms.accepts(schema({"type": "integer", "format": "int32"}), "5")
    with pytest.raises(GrammarError, match="uri-template"):
        forms.matcher(schema({"type": "string", "format": "uri-template"}))
