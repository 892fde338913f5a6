"""Guides of TensorRT-LLM become the forms of the gateway's own API."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.errors import InvalidRequest
from services.gateway.apis.triton.models import ENSEMBLE
from services.gateway.apis.triton.rows import InferLimits, row_of_json
from services.gateway.apis.triton.to_message import generate_message
from services.pb import sampling_pb2

LIMITS = InferLimits(max_batch_size=1, max_numbers=0, has_tables=False)
SCHEMA = '{"type": "object"}'


def form_of(kind: str, guide: str | None = None) -> sampling_pb2.StructuredOutput:
    body = {"text_input": "a", "max_tokens": 1, "guided_decoding_guide_type": kind, "guided_decoding_guide": guide}
    return generate_message(row_of_json(ENSEMBLE, body, LIMITS), "id", str, ()).sampling.structured_output


def test_each_type_of_guide_sets_the_field_of_its_form() -> None:
    def guide(**form: Any) -> sampling_pb2.StructuredOutput:
        return sampling_pb2.StructuredOutput(**form, field_name="guided_decoding_guide")

    assert form_of("json") == sampling_pb2.StructuredOutput(json_object=True, field_name="guided_decoding_guide_type")
    assert form_of("json_schema", SCHEMA) == guide(json_schema=SCHEMA)
    assert form_of("regex", "a+") == guide(regex="a+")
    assert form_of("ebnf_grammar", 'root ::= "a"') == guide(grammar='root ::= "a"')
    assert form_of("structural_tag", "{}") == guide(structural_tag="{}")


@pytest.mark.parametrize(("kind", "guide", "words"), [("xml", "<a>", "'xml'"), ("", "a+", "guide needs a guided")])
def test_an_unknown_type_or_none_is_refused(kind: str, guide: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        form_of(kind, guide)
