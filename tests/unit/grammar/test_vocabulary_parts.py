"""The parts of a vocabulary by which masks are found faster change no mask."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from services.common.config import EMBEDDED_MODEL
from services.common.structured_output import Constraint, StructuredOutput
from services.grammar.lower import lower
from services.grammar.matcher import compile_grammar
from services.grammar.vocabulary import SLICES, Vocabulary, read_vocabulary

FORMS = [
    {"type": "string", "maxLength": 12},
    {"type": "array", "items": {"type": "string", "minLength": 3, "maxLength": 7}, "minItems": 3, "maxItems": 3},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-z ]{2,9}é?$"}, "b": {"type": "string"}},
     "required": ["a", "b"]},
]  # fmt: skip


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return read_vocabulary(EMBEDDED_MODEL, 1024, [2])


@pytest.mark.parametrize("form", FORMS)
def test_masks_are_those_of_a_vocabulary_in_one_part(vocabulary: Vocabulary, form: object) -> None:
    grammar = lower(StructuredOutput(Constraint.JSON_SCHEMA, json.dumps(form)), vocabulary.special_tokens)
    tokenizer, generator = vocabulary.load(), random.Random(3)
    assert tokenizer.vocab_size == 1024 and len(SLICES) > len(tokenizer.general_slices())
    found, expected = (compile_grammar(each, grammar) for each in (tokenizer, tokenizer.with_slices([])))
    for _ in range(40):
        if expected.is_stopped():
            break
        mask = found.compute_bitmask()
        assert mask == expected.compute_bitmask()
        choices = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()
        token_id = generator.choice(choices)
        assert found.consume_token(token_id) and expected.consume_token(token_id)
