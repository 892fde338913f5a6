"""`TokenLogprobs`: the log-probabilities that a request gets for one token."""

from __future__ import annotations

from dataclasses import dataclass

from services.pb import sampling_pb2


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities, before any sampling option."""

    logprob: float  # of the sampled token, or of the prompt's token
    # (token_id, logprob) of the most likely tokens, most likely first; then of `SamplingParams.logprob_token_ids`
    top: tuple[tuple[int, float], ...]
    rank: int | None = None  # how many tokens are at least as likely as this one, itself included; None: not counted


def encode_logprobs(value: TokenLogprobs) -> sampling_pb2.TokenLogprobs:
    """Converts to the message of `protos/sampling.proto`."""
    return sampling_pb2.TokenLogprobs(
        logprob=value.logprob,
        top_token_ids=[token_id for token_id, _ in value.top],
        top_logprobs=[logprob for _, logprob in value.top],
        rank=value.rank,
    )


def decode_logprobs(message: sampling_pb2.TokenLogprobs) -> TokenLogprobs:
    """Converts from the message of `protos/sampling.proto`."""
    top = tuple(zip(message.top_token_ids, message.top_logprobs, strict=True))
    return TokenLogprobs(message.logprob, top, message.rank if message.HasField("rank") else None)
