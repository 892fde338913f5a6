"""References between subschemas with `$id` mean what `jsonschema` says, and an ambiguous id is refused."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
import referencing.exceptions

from services.common.structured_output import Constraint, StructuredOutput
from services.grammar.endless_schema import check_ends
from services.grammar.grammar_error import GrammarError
from services.grammar.schema_dialect import translate
from tests.support.dense.forms import Forms, make_vocabulary

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
TEXTS = [text.replace("v", value) for text in ("v", '{"p":v}', '{"p":{"p":v}}') for value in ("null", "true", "5")]
LEAVES: list[dict[str, Any]] = [{"type": "null"}, {"type": "boolean"}, {"type": "integer", "maximum": 9}]
REFERENCES = ["#/definitions/x", "#/definitions/y", "#x", "#y", "http://h/a#/definitions/x", "a", "b#/definitions/y"]
NUM_SCHEMAS = 80


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Forms:
    return Forms(make_vocabulary(tmp_path_factory.mktemp("tokenizer")))


def schema(value: Any) -> StructuredOutput:
    return StructuredOutput(Constraint.JSON_SCHEMA, json.dumps(value))


def random_schema(generator: random.Random, ids: list[str], depth: int = 2) -> dict[str, Any]:
    """A schema with definitions, references and ids, at places where they count and where they do not."""
    kind, value = generator.random(), dict[str, Any]()
    if kind < 0.4 or not depth:
        value = dict(generator.choice([*LEAVES, *({"$ref": each} for each in generator.sample(REFERENCES, 3))]))
    elif kind < 0.8:
        inner = random_schema(generator, ids, depth - 1)
        value = {"type": "object", "properties": {"p": inner}, "required": ["p"]}
    else:
        value = {"allOf": [random_schema(generator, ids, depth - 1)]}
    if ids and generator.random() < 0.4:
        value["$id"] = ids.pop(generator.randrange(len(ids)))
    if depth and generator.random() < 0.6:
        value["definitions"] = {name: random_schema(generator, ids, depth - 1) for name in "xy"}
    return value


def judge(value: dict[str, Any], text: str) -> bool | None:
    """None: the validator cannot resolve a reference, or follows one for ever."""
    try:
        return jsonschema.Draft7Validator(value).is_valid(json.loads(text))
    except (referencing.exceptions.Unresolvable, RecursionError):
        return None


def test_references_beside_and_below_ids_mean_what_draft_7_says(forms: Forms) -> None:
    num_judged = 0
    for seed in range(NUM_SCHEMAS):
        ids = ["http://h/a", "http://h/b", "http://h/c/", "#x", "#y", "b"]
        value = random_schema(random.Random(seed), ids[:5]) | {"$schema": DRAFT_7}
        try:
            forms.matcher(schema(value))
        except GrammarError:
            continue  # most often a reference without a target
        for text in TEXTS:
            if (is_valid := judge(value, text)) is not None:
                num_judged += 1
                assert forms.accepts(schema(value), text) == is_valid, (value, text)
    assert num_judged > 5 * len(TEXTS)


@pytest.mark.parametrize(
    "value",
    [
        {"$id": "http://h/a", "definitions": {"x": {"$id": "http://h/a", "type": "null"}}},
        {"$id": "http://h/a", "definitions": {"x": {"$id": "a"}}},
        {"$id": "http://h/", "definitions": {"x": {"$id": "#b"}, "y": {"items": [{"$id": "#b"}]}}},
        {"allOf": [{"$id": "http://h/c#"}, {"$id": "http://h/c"}]},
    ],
)
def test_an_id_of_two_subschemas_is_refused_by_name(value: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match=r"^two subschemas have the \$id 'http://h/[abc#]+'$"):
        translate(json.dumps(value))


def test_an_id_that_is_no_uri_is_refused_by_name() -> None:
    with pytest.raises(GrammarError, match=r"^\$id 'http://\[' is not a URI"):
        translate('{"$id": "http://h/", "items": {"$id": "http://["}}')


def test_what_only_looks_like_an_id_is_none() -> None:
    constant = {"const": {"$id": "a"}, "enum": [{"$id": "a"}, {"$id": "a"}], "properties": {"$id": {"const": "a"}}}
    text = json.dumps({"$id": "a", "allOf": [constant]})
    assert translate(text) is text


def test_a_part_without_an_end_is_found_behind_ids_and_anchors() -> None:
    node = {"type": "object", "required": ["p"]}
    for reference, named in (
        ("http://h/a", {"$id": "http://h/a"}),
        ("a", {"$id": "http://h/a"}),
        ("#n", {"$anchor": "n"}),
        ("#n", {"$schema": DRAFT_7, "$id": "#n"}),
        ("urn:x:y", {"$id": "urn:x:y"}),
        ("#", {"$id": "urn:x:y"}),
        ("a#/definitions/x", {"$id": "http://h/a", "definitions": {"x": {"$ref": "#"}}}),
    ):
        value = named | node | {"properties": {"p": {"$ref": reference}}}
        with pytest.raises(GrammarError, match=r"^only an endless text"):
            check_ends(json.dumps(value))
        check_ends(json.dumps(value | {"required": []}))


def test_a_pointer_begins_at_the_nearest_id(forms: Forms) -> None:
    endless = {"$ref": "#/$defs/x"}
    inner = {"$id": "http://h/b", "$ref": "#/$defs/x", "$defs": {"x": {"type": "integer"}}}
    value = {"type": "object", "properties": {"p": inner}, "required": ["p"], "$defs": {"x": endless}}
    for text in ('{"p":5}', '{"p":true}'):
        is_valid = jsonschema.Draft202012Validator(value).is_valid(json.loads(text))
        assert forms.accepts(schema(value), text) == is_valid
    with pytest.raises(GrammarError, match=r"^only an endless text"):
        check_ends(json.dumps(value | {"$schema": DRAFT_7}))  # there the id beside the reference means nothing


def test_a_format_behind_an_anchor_is_translated(forms: Forms) -> None:
    value = {"$ref": "#d", "$defs": {"d": {"$anchor": "d", "type": "string", "format": "date"}}}
    assert forms.accepts(schema(value), '"2024-02-29"')
    assert not forms.accepts(schema(value), '"2023-02-29"')
