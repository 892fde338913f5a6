"""Sampling options survive the wire unchanged; missing ones get their defaults."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidRequest
from services.common.sampling_messages import decode_sampling, encode_sampling
from services.common.sampling_params import ReasoningLimit, SamplingParams
from services.common.structured_output import Constraint, StructuredOutput
from services.pb import sampling_pb2

TOKENS = st.integers(0, 2**32 - 1)
TEXT_FORMS = [each for each in Constraint if each not in (Constraint.CHOICE, Constraint.JSON_OBJECT)]
FORMS = st.one_of(
    st.builds(StructuredOutput, st.sampled_from(TEXT_FORMS), st.text()),
    st.builds(StructuredOutput, st.just(Constraint.CHOICE), choices=st.lists(st.text()).map(tuple)),
    st.just(StructuredOutput(Constraint.JSON_OBJECT)),
)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_k=st.none() | st.integers(1, 2**31 - 1),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    min_tokens=st.integers(0, 2**31 - 1),
    seed=st.integers(0, 2**64 - 1),
    logit_bias=st.dictionaries(TOKENS, st.floats(-100, 100, width=32)).map(lambda bias: tuple(sorted(bias.items()))),
    bad_words=st.lists(st.lists(TOKENS, min_size=1, max_size=5).map(tuple), max_size=5).map(tuple),
    allowed_token_ids=st.sets(TOKENS, max_size=5).map(lambda token_ids: tuple(sorted(token_ids))),
    structured_output=st.none() | FORMS,
    reasoning_limit=st.none() | st.builds(ReasoningLimit, TOKENS, TOKENS, st.none() | TOKENS),
)


@given(params=PARAMS)
def test_options_survive_the_wire(params: SamplingParams) -> None:
    data = encode_sampling(params).SerializeToString()
    assert decode_sampling(sampling_pb2.SamplingParams.FromString(data)) == params


def test_every_option_has_a_field_of_the_same_name() -> None:
    names = {field.name for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields}
    assert names == {field.name for field in fields(SamplingParams)}


def test_missing_options_take_the_given_default_and_present_ones_do_not() -> None:
    assert decode_sampling(sampling_pb2.SamplingParams(top_k=3), seed=7) == SamplingParams(top_k=3, seed=7)
    assert decode_sampling(sampling_pb2.SamplingParams(seed=0, temperature=0.0), seed=7) == SamplingParams(
        temperature=0.0, seed=0
    )


@pytest.mark.parametrize("form", [{}, {"json_object": False}])
def test_a_structured_output_without_a_form_is_refused(form: dict[str, bool]) -> None:
    message = sampling_pb2.SamplingParams(structured_output=sampling_pb2.StructuredOutput(**form))
    with pytest.raises(InvalidRequest, match="structured_output names no form"):
        decode_sampling(message)


def test_the_name_of_a_form_survives_the_wire_and_does_not_make_it_another_form() -> None:
    form = StructuredOutput(Constraint.REGEX, "a+", field_name="guided_regex")
    decoded = decode_sampling(encode_sampling(SamplingParams(structured_output=form))).structured_output
    assert decoded is not None and decoded.field_name == "guided_regex"
    assert decoded == StructuredOutput(Constraint.REGEX, "a+") and len({decoded, form}) == 1


@pytest.mark.parametrize("name", ["x" * 129, "a\nb"])
def test_a_name_that_cannot_stand_in_a_message_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="field_name has"):
        StructuredOutput(Constraint.REGEX, "a+", field_name=name).validate()


def test_every_form_has_a_field_of_the_same_name() -> None:
    names = {field.name for field in sampling_pb2.StructuredOutput.DESCRIPTOR.oneofs_by_name["constraint"].fields}
    assert names == set(Constraint)
