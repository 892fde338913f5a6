"""The benchmark of schemas: its schemas have many keywords, it judges by another library, and the figures are right."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from bench.schemas import Example, Llguidance, Result, describe, examine, made_examples, suite_examples, tokens_of
from services.common.config import EMBEDDED_MODEL
from services.grammar.vocabulary import Vocabulary, read_vocabulary

KEYWORDS = (
    "anyOf oneOf allOf $ref not if enum const minLength maxLength pattern format minimum exclusiveMaximum multipleOf "
    "prefixItems minItems maxItems uniqueItems required additionalProperties patternProperties propertyNames "
    "dependentRequired"
)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return read_vocabulary(EMBEDDED_MODEL, 1024, [2])


def test_its_schemas_have_the_keywords_of_the_suite_and_values_of_both_kinds() -> None:
    examples = [*made_examples(300, 1)]
    text = json.dumps([each.schema for each in examples])
    assert [keyword for keyword in KEYWORDS.split() if f'"{keyword}"' not in text] == []
    for each in examples[:40]:
        jsonschema.Draft202012Validator.check_schema(each.schema)
    valid = [is_valid for each in examples for is_valid in each.is_valid]
    assert 0.1 < valid.count(False) / len(valid) < 0.6


def test_accepted_schemas_accept_what_is_valid_and_nothing_else(vocabulary: Vocabulary) -> None:
    engine, tokenizer, num_accepted = Llguidance(vocabulary), vocabulary.load(), 0
    for example in made_examples(80, 7):
        result = examine(engine, example, [tokens_of(tokenizer, value) for value in example.values])
        if result.error is None:
            num_accepted += 1
            assert list(result.accepted) == list(example.is_valid), example
    assert num_accepted > 40


def test_its_row_counts_schemas_values_and_times() -> None:
    examples = [Example({}, (1, 2, 3, 4), (True, True, False, False))] * 2 + [Example({}, (1,), (True,))] * 2
    accepted = Result(None, 0.002, (True, False, True, False), (1e-6, 5e-6))
    results = [accepted, accepted, Result("no such keyword"), Result("not ended after 10 s")]
    assert describe("name", examples, results) == "name | 2 | 1 | 2 | 2 | 2 | 2 | 2 | 2.00, 2.00 | 3, 5"


def test_it_reads_a_suite(tmp_path: Path) -> None:
    directory = tmp_path / "tests" / "draft7" / "optional"
    directory.mkdir(parents=True)
    case = {"schema": {"type": "string"}, "tests": [{"data": 1, "valid": False}, {"data": "a", "valid": True}]}
    (directory / "type.json").write_text(json.dumps([case, case | {"schema": True}]))
    first, second = suite_examples(tmp_path)
    assert first.schema == {"$schema": "http://json-schema.org/draft-07/schema#", "type": "string"}
    assert (first.values, first.is_valid, second.schema) == ([1, "a"], [False, True], True)
