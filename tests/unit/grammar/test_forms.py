"""Which texts the forms allow, by the judgement of Python's `re` and of `jsonschema`."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from services.common.structured_output import Constraint, StructuredOutput
from services.grammar.grammar_error import GrammarError
from tests.support.dense.forms import Forms, make_vocabulary, schema

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TEXTS = [
    '{"name":"Ann","age":30}', '{"name": "Ann", "age": 30, "tags": ["a", null]}', '{"name":"","age":30}',
    '{"name":"Annnnn","age":30}', '{"name":"Ann","age":151}', '{"name":"Ann","age":-1}', '{"name":"Ann","age":1.5}',
    '{"name":"Ann"}', '{"name":"Ann","age":30,"x":1}', '{"name":"Ann","age":30,"tags":["c"]}',
    '{"name":"Ann","age":30,"tags":["a","a","a"]}', "[]", "null", '"name"', "{", "", '{"name":"Ann","age":30}}',
]  # fmt: skip
PATTERNS = [r"\d{3}-[a-f]{2,4}", r"^(yes|no)$", r"(a|b)*c?", r"[^\n]{1,3}", r"é+", r"a.b", r"(ab){2}|c", "a/b\\\\"]
CANDIDATES = ["123-ab", "123-abcde", "12-ab", "yes", "no", "yesno", "", "abab", "ababc", "c", "x\n", "é", "éé", "a\nb",
              "axb", "abc", "a/b\\", "a/b"]  # fmt: skip


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Forms:
    return Forms(make_vocabulary(tmp_path_factory.mktemp("tokenizer")))


def is_valid(text: str, schema: object) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


@pytest.mark.parametrize("text", TEXTS)
def test_a_schema_allows_what_is_valid(forms: Forms, text: str) -> None:
    assert forms.accepts(schema(PERSON), text) == is_valid(text, PERSON)


@pytest.mark.parametrize("text", ['{"a": [1, {"b": null}]}', "{}", "[]", "1", "null", '{"a"}'])
def test_a_json_object_is_an_object(forms: Forms, text: str) -> None:
    expected = is_valid(text, {"type": "object"})
    assert forms.accepts(StructuredOutput(Constraint.JSON_OBJECT), text) == expected


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_allows_what_it_matches_as_a_whole(forms: Forms, pattern: str) -> None:
    form = StructuredOutput(Constraint.REGEX, pattern)
    for text in CANDIDATES:
        assert forms.accepts(form, text) == bool(re.fullmatch(pattern, text)), text


def test_a_choice_allows_its_texts_alone(forms: Forms) -> None:
    choices = ("yes", "no", "no way", 'a "quoted"\n\\ one', "😀é", "a\0b", "(.*)", "%x /y/")
    form = StructuredOutput(Constraint.CHOICE, choices=choices)
    for text in (*choices, "n", "no w", "yesno", "a", "x", ""):
        assert forms.accepts(form, text) == (text in choices), text


@pytest.mark.parametrize(
    "grammar", ['root ::= "(" root ")" | [0-9]+', 'start: "(" start ")" | /[0-9]+/'], ids=["GBNF", "Lark"]
)
def test_a_grammar_of_either_syntax(forms: Forms, grammar: str) -> None:
    form = StructuredOutput(Constraint.GRAMMAR, grammar)
    for text in ("12", "((7))"):
        assert forms.accepts(form, text), text
    for text in ("((7)", "()", "", "7)"):
        assert not forms.accepts(form, text), text


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (schema({"type": "object", "required": ["x"], "properties": {"x": False}}), "Unsatisfiable"),
        (schema({"enum": []}), "Unsatisfiable"),
        (schema({"$ref": "https://example.com/schema"}), "example.com"),
        (schema({"type": "string", "not": {}}), "not"),
        (schema({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}), "uniqueItems"),
        (StructuredOutput(Constraint.JSON_SCHEMA, "false"), "false"),
        (StructuredOutput(Constraint.JSON_SCHEMA, '{"type":'), "EOF"),
        (StructuredOutput(Constraint.REGEX, "(?=a)b"), "look-ahead"),
        (StructuredOutput(Constraint.REGEX, "(a"), "unclosed"),
        (StructuredOutput(Constraint.GRAMMAR, "nonsense"), "::="),
        (StructuredOutput(Constraint.GRAMMAR, "start: missing"), "missing"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(forms: Forms, form: StructuredOutput, words: str) -> None:
    with pytest.raises(GrammarError, match=words):
        forms.matcher(form)


def test_whitespace_in_json_is_bounded_unless_the_schema_says_otherwise(forms: Forms) -> None:
    free = PERSON | {"x-guidance": {"whitespace_pattern": "[ \\n]+"}}
    none = PERSON | {"x-guidance": {"whitespace_pattern": None, "whitespace_flexible": False}}
    texts = ('{"name":"Ann","age":1}', '{"name": "Ann", "age": 1}', '{\n  "name": "Ann", "age": 1}')
    for value, expected in ((PERSON, [True, True, False]), (free, [True] * 3), (none, [True, False, False])):
        assert [forms.accepts(schema(value), text) for text in texts] == expected


DIFFERENT = {"w": "\u0301\u203f\u200d²½", "s": "\x1c\x1f"}  # from Python, by class; those below are in both or neither
SAME = "aZ9_é東٣ -\t\n\x0b\x85\xa0\u2003\u3000\ufeff/"


@pytest.mark.parametrize("name", ["w", "W", "s", "S", "d", "D"])
def test_classes_are_those_of_unicode_which_are_pythons_but_for_some_characters(forms: Forms, name: str) -> None:
    form = StructuredOutput(Constraint.REGEX, rf"\{name}")
    for character in SAME + "".join(DIFFERENT.values()):
        is_other = character in DIFFERENT.get(name.lower(), "")
        assert forms.accepts(form, character) == (bool(re.fullmatch(rf"\{name}", character)) != is_other), character


@pytest.mark.parametrize("name", ["w", "W", "s", "S", "d", "D"])
def test_classes_in_patterns_of_schemas_are_those_of_ascii_but_for_spaces(forms: Forms, name: str) -> None:
    form = schema({"type": "string", "pattern": rf"^\{name}$"})
    for character in "aZ9_é東٣-\u0301² \xa0\u2003\x85\ufeff":
        expected = bool(re.fullmatch(rf"\{name}", character, 0 if name in "sS" else re.ASCII))
        assert forms.accepts(form, json.dumps(character, ensure_ascii=False)) == expected, character
