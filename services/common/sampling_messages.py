"""Converts `SamplingParams` to the gRPC message and back, for clients, gateway and dense worker."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from services.common.sampling_params import SamplingParams
from services.pb import sampling_pb2

_LISTS = ("logit_bias", "bad_words", "allowed_token_ids")
_SCALARS = tuple(field.name for field in fields(SamplingParams) if field.name not in _LISTS)


def encode_sampling(params: SamplingParams) -> sampling_pb2.SamplingParams:
    """The message. It has every option, defaults included, except a `top_k` that is None."""
    return sampling_pb2.SamplingParams(
        **{name: getattr(params, name) for name in _SCALARS},
        logit_bias=dict(params.logit_bias),
        bad_words=[sampling_pb2.TokenSequence(token_ids=word) for word in params.bad_words],
        allowed_token_ids=params.allowed_token_ids,
    )


def decode_sampling(message: sampling_pb2.SamplingParams, **defaults: Any) -> SamplingParams:
    """The options of a message, not validated. Missing ones come from `defaults`, else from `SamplingParams`."""
    given = {name: getattr(message, name) for name in _SCALARS if message.HasField(name)}
    if message.logit_bias:
        given["logit_bias"] = tuple(sorted(message.logit_bias.items()))
    if message.bad_words:
        given["bad_words"] = tuple(tuple(word.token_ids) for word in message.bad_words)
    if message.allowed_token_ids:
        given["allowed_token_ids"] = tuple(sorted(set(message.allowed_token_ids)))
    return SamplingParams(**{**defaults, **given})
