"""`TokenLogprobs`: what a request that asks for log-probabilities learns of one token. A plain value."""

from __future__ import annotations

from dataclasses import dataclass

from services.pb import sampling_pb2


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities, before any sampling option."""

    logprob: float  # of the token that was chosen, or stands in the prompt
    top: tuple[tuple[int, float], ...]  # the likeliest (token_id, logprob), most likely first


def encode_logprobs(value: TokenLogprobs) -> sampling_pb2.TokenLogprobs:
    """As a message; see `protos/sampling.proto`."""
    return sampling_pb2.TokenLogprobs(
        logprob=value.logprob,
        top_token_ids=[token_id for token_id, _ in value.top],
        top_logprobs=[logprob for _, logprob in value.top],
    )


def decode_logprobs(message: sampling_pb2.TokenLogprobs) -> TokenLogprobs:
    """The value of a message."""
    return TokenLogprobs(
        message.logprob, tuple(zip(message.top_token_ids, message.top_logprobs, strict=True))
    )
