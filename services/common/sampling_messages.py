"""Converts `SamplingParams` to the gRPC message and back, for clients, gateway and dense worker."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from services.common.errors import InvalidRequest
from services.common.sampling_params import ReasoningLimit, SamplingParams, TimestampRules
from services.common.structured_output import FIELD_NAME, Constraint, StructuredOutput
from services.pb import sampling_pb2

_COMPOUND = (
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "structured_output",
    "reasoning_limit",
    "timestamps",
    "logprob_token_ids",
)
_SCALARS = tuple(field.name for field in fields(SamplingParams) if field.name not in _COMPOUND)


def encode_sampling(params: SamplingParams) -> sampling_pb2.SamplingParams:
    """The message. It has every option, defaults included, except a `top_k` that is None."""
    return sampling_pb2.SamplingParams(
        **{name: getattr(params, name) for name in _SCALARS},
        logit_bias=dict(params.logit_bias) or None,
        bad_words=[sampling_pb2.TokenSequence(token_ids=word) for word in params.bad_words],
        allowed_token_ids=params.allowed_token_ids,
        structured_output=_encode_structured_output(params.structured_output),
        reasoning_limit=_encode_reasoning_limit(params.reasoning_limit),
        timestamps=_encode_timestamps(params.timestamps),
        logprob_token_ids=params.logprob_token_ids,
    )


def decode_sampling(message: sampling_pb2.SamplingParams, **defaults: Any) -> SamplingParams:
    """The options of a message, not validated. Missing ones come from `defaults`, else from `SamplingParams`.

    Raises `InvalidRequest` for a `structured_output` that says nothing.
    """
    given = {name: getattr(message, name) for name in _SCALARS if message.HasField(name)}
    if message.logit_bias:
        given["logit_bias"] = tuple(sorted(message.logit_bias.items()))
    if message.bad_words:
        given["bad_words"] = tuple(tuple(word.token_ids) for word in message.bad_words)
    if message.allowed_token_ids:
        given["allowed_token_ids"] = tuple(sorted(set(message.allowed_token_ids)))
    if message.logprob_token_ids:
        given["logprob_token_ids"] = tuple(dict.fromkeys(message.logprob_token_ids))
    if message.HasField("structured_output"):
        given["structured_output"] = _decode_structured_output(message.structured_output)
    if message.HasField("reasoning_limit"):
        limit = message.reasoning_limit
        begin_token_id = limit.begin_token_id if limit.HasField("begin_token_id") else None
        given["reasoning_limit"] = ReasoningLimit(limit.max_tokens, limit.end_token_id, begin_token_id)
    if message.HasField("timestamps"):
        rules = message.timestamps
        last = rules.last_initial_token_id if rules.HasField("last_initial_token_id") else None
        given["timestamps"] = TimestampRules(rules.first_token_id, rules.end_token_id, last)
    return SamplingParams(**{**defaults, **given})


def _encode_timestamps(rules: TimestampRules | None) -> sampling_pb2.TimestampRules | None:
    if rules is None:
        return None
    return sampling_pb2.TimestampRules(
        first_token_id=rules.first_token_id,
        end_token_id=rules.end_token_id,
        last_initial_token_id=rules.last_initial_token_id,
    )


def _encode_reasoning_limit(limit: ReasoningLimit | None) -> sampling_pb2.ReasoningLimit | None:
    if limit is None:
        return None
    return sampling_pb2.ReasoningLimit(
        max_tokens=limit.max_tokens, end_token_id=limit.end_token_id, begin_token_id=limit.begin_token_id
    )


def _encode_structured_output(structure: StructuredOutput | None) -> sampling_pb2.StructuredOutput | None:
    if structure is None:
        return None
    if structure.constraint is Constraint.CHOICE:
        value: Any = sampling_pb2.Choice(choices=structure.choices)
    else:
        value = True if structure.constraint is Constraint.JSON_OBJECT else structure.text
    return sampling_pb2.StructuredOutput(**{structure.constraint.value: value}, field_name=structure.field_name)


def _decode_structured_output(message: sampling_pb2.StructuredOutput) -> StructuredOutput:
    name, field_name = message.WhichOneof("constraint"), message.field_name or FIELD_NAME
    if name is None or (name == "json_object" and not message.json_object):
        names = ", ".join(constraint.value for constraint in Constraint)
        raise InvalidRequest(f"{FIELD_NAME} names no form: one of {names} is required", FIELD_NAME)
    constraint = Constraint(name)
    if constraint is Constraint.CHOICE:
        return StructuredOutput(constraint, choices=tuple(message.choice.choices), field_name=field_name)
    text = "" if constraint is Constraint.JSON_OBJECT else getattr(message, name)
    return StructuredOutput(constraint, text, field_name=field_name)
