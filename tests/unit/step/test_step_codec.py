"""Every plan survives the wire unchanged. A message whose columns differ in length is refused."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.beams.options import BeamSearchOptions, EarlyStopping
from services.common.errors import InvalidRequest
from services.common.sampling_params import SamplingParams
from services.lora.adapter import Adapter
from services.pb import attn_pb2, sequence_pb2, step_pb2
from services.step import (
    Fork,
    NewSequence,
    PlanAccepted,
    PlanEntries,
    PlanEntry,
    PromptEmbedsRef,
    SequenceOpened,
    SequenceSpec,
    SourceRef,
    StepPlan,
    TokenColumns,
)
from services.step.codec import decode_answer, decode_plan, encode_accepted, encode_opened, encode_plan
from services.step.prompt_span import PromptSpan
from services.step.sequence_spec import decode_spec, encode_spec

SEQ_IDS = st.integers(0, 2**64 - 1)
COUNTS = st.integers(0, 2**31)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=5).map(tuple)
ENTRIES = st.builds(
    lambda seq_id, position, num_known, num_logits, drafts: PlanEntry(
        seq_id, position, num_known + len(drafts), num_logits + len(drafts) if drafts else num_logits, drafts
    ),
    SEQ_IDS,
    COUNTS,
    st.integers(1, 2**20),
    st.integers(0, 1),
    st.one_of(st.just(()), TOKENS),
)
HASHES = st.sampled_from(["", "0a", "ff" * 32])
SPANS = st.lists(st.builds(PromptSpan, COUNTS, COUNTS, HASHES, COUNTS, COUNTS), max_size=3).map(tuple)
NEW_SEQUENCES = st.builds(
    NewSequence,
    seq_id=SEQ_IDS,
    request_id=st.text(max_size=5),
    token_ids=TOKENS,
    num_prompt_tokens=COUNTS,
    prefix_key=st.binary(max_size=5),
    ignores_prefix_cache=st.booleans(),
    max_cached_tokens=st.none() | st.integers(0, 2**32 - 1),
    num_extra_rows=COUNTS,
    spans=SPANS,
    traceparent=st.text(max_size=5),
)
SPEC_FIELDS = dict(
    request_id=st.text(max_size=5),
    prompt_token_ids=TOKENS.map(list),
    sampling=st.builds(SamplingParams, temperature=st.floats(0, 2), seed=SEQ_IDS, top_k=st.none() | st.integers(1, 9)),
    max_tokens=COUNTS,
    stop_token_ids=TOKENS,
    cache_salt=st.text(max_size=5),
    num_logprobs=st.none() | st.integers(0, 20),
    priority=st.integers(-100, 100),
    tenant=SEQ_IDS,
    client=SEQ_IDS,
    traceparent=st.text(max_size=5),
    adapter=st.none()
    | st.builds(Adapter, st.text(max_size=5), st.text("0af", min_size=1, max_size=5), st.text(max_size=5)),
    prompt_embeds=st.none()
    | st.builds(PromptEmbedsRef, st.text("0af", min_size=1, max_size=5), COUNTS, COUNTS, st.text(max_size=5), COUNTS),
    beam_search=st.none()
    | st.builds(BeamSearchOptions, COUNTS, COUNTS, st.floats(-10, 10), st.sampled_from(EarlyStopping)),
    source=st.none() | st.builds(SourceRef, st.text("0af", min_size=1, max_size=5), COUNTS),
    features=st.dictionaries(st.text(max_size=5), st.binary(max_size=5), max_size=3),
    spans=SPANS,
)
SPECS = st.builds(SequenceSpec, **SPEC_FIELDS)
PLANS = st.builds(
    StepPlan,
    step_id=SEQ_IDS,
    entries=st.lists(ENTRIES, max_size=4).map(PlanEntries.of),
    close_seq_ids=st.lists(SEQ_IDS, max_size=3).map(tuple),
    sampled=st.lists(st.tuples(SEQ_IDS, st.integers(0, 2**32 - 1)), max_size=4).map(TokenColumns.of),
    forks=st.lists(st.builds(Fork, SEQ_IDS, SEQ_IDS, COUNTS), max_size=2).map(tuple),
    new_sequences=st.lists(NEW_SEQUENCES, max_size=2).map(tuple),
    forced=st.lists(st.tuples(SEQ_IDS, st.integers(0, 2**32 - 1)), max_size=4).map(tuple),
    lane=st.integers(0, 3),
    extra_rows=st.lists(st.tuples(SEQ_IDS, COUNTS), max_size=2).map(tuple),
)


@given(PLANS)
def test_a_plan_survives_the_wire(plan: StepPlan) -> None:
    data = encode_plan(plan).SerializeToString()
    assert decode_plan(step_pb2.StepPlan.FromString(data)) == plan


def test_a_spec_and_its_message_have_the_same_fields() -> None:
    names = {field.name for field in fields(SequenceSpec)}
    assert names == set(sequence_pb2.SequenceSpec.DESCRIPTOR.fields_by_name)
    assert names == SPEC_FIELDS.keys(), "the next test tries them all"


@given(SPECS)
def test_what_was_asked_for_survives_the_wire(spec: SequenceSpec) -> None:
    data = encode_spec(spec).SerializeToString()
    assert decode_spec(sequence_pb2.SequenceSpec.FromString(data)) == spec


@given(SEQ_IDS, st.lists(COUNTS, min_size=5, max_size=5), st.booleans(), st.none() | st.text(max_size=9))
def test_an_opening_survives_the_wire(seq_id: int, counts: list[int], has_extra_rows: bool, error: str | None) -> None:
    opened = SequenceOpened(seq_id, *counts, has_extra_rows=has_extra_rows, error=error)
    data = encode_opened(opened).SerializeToString()
    assert decode_answer(attn_pb2.PlanAnswer.FromString(data)) == opened


@given(SEQ_IDS, COUNTS, COUNTS, st.dictionaries(SEQ_IDS, st.text(max_size=9), max_size=3))
def test_an_acceptance_survives_the_wire(
    step_id: int, num_freed: int, num_free: int, errors: dict[int, str]
) -> None:
    accepted = PlanAccepted(step_id, num_freed, num_free, errors)
    data = encode_accepted(accepted).SerializeToString()
    assert decode_answer(attn_pb2.PlanAnswer.FromString(data)) == accepted


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (step_pb2.StepPlan(step_id=3, seq_ids=bytes(8), num_tokens=bytes(16)), "entries have 1, 0, 2, 0"),
        (step_pb2.StepPlan(step_id=3, sampled_seq_ids=bytes(8)), "columns of plan 3 differ in length"),
        (step_pb2.StepPlan(step_id=3, fork_parents=[1]), "columns of plan 3 differ in length"),
        (step_pb2.StepPlan(step_id=3, positions=bytes(13)), "positions of plan 3 has 13 bytes, no multiple of 8"),
        (
            step_pb2.StepPlan(
                step_id=3,
                seq_ids=bytes(8),
                positions=bytes(8),
                num_tokens=b"\2" + bytes(7),
                num_logits=b"\2" + bytes(7),
                num_drafts=[2],
                draft_token_ids=[7],
            ),
            "plan 3 counts 2 drafts and has 1",
        ),
    ],
)
def test_columns_of_different_lengths_are_refused(message: step_pb2.StepPlan, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        decode_plan(message)
