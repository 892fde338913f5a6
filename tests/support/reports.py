"""What specs ask for of features that report, and what their reports say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.common.token_logprobs import TokenLogprobs
from services.pb import prompt_logprobs_pb2


def prompt_logprobs(num_likeliest: int | None) -> dict[str, bytes]:
    """The `SequenceSpec.features` that ask for the log-probabilities of the prompt; None: for nothing."""
    if num_likeliest is None:
        return {}
    request = prompt_logprobs_pb2.PromptLogprobsRequest(num_likeliest=num_likeliest)
    return {"prompt_logprobs": request.SerializeToString()}


def read_prompt_logprobs(num_tokens: int, values: bytes) -> list[TokenLogprobs]:
    """The rows of a report, as `protos/prompt_logprobs.proto` defines them."""
    width = len(values) // 4 // num_tokens
    num_top = (width - 2) // 2
    integers = np.frombuffer(values, "<u4").reshape(num_tokens, width)
    floats = np.frombuffer(values, "<f4").reshape(num_tokens, width)
    return [
        TokenLogprobs(
            float(floats[i, 0]),
            tuple(zip(integers[i, 2 : 2 + num_top].tolist(), floats[i, 2 + num_top :].tolist(), strict=True)),
            int(integers[i, 1]),
        )
        for i in range(num_tokens)
    ]


def write_prompt_logprobs(tokens: Sequence[TokenLogprobs]) -> np.ndarray:
    """The rows, uint32 [num_tokens, n]. All tokens have as many likely ones; a rank of None is 0."""
    rows = [
        np.concatenate(
            [
                np.array([token.logprob], "<f4").view("<u4"),
                np.array([token.rank or 0, *(token_id for token_id, _ in token.top)], "<u4"),
                np.array([logprob for _, logprob in token.top], "<f4").view("<u4"),
            ]
        )
        for token in tokens
    ]
    return np.stack(rows)
