"""Log-probabilities of the model itself: log_softmax of its logits, in float32.

They are computed on the device, only for the requested tokens; the host reads a few numbers per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from services.common.token_logprobs import TokenLogprobs

MAX_ROWS_AT_A_TIME = 64  # of log_softmax, which takes as much memory as the logits


@dataclass(frozen=True, slots=True)
class RankedTokens:
    """Log-probabilities of one token per row and of the row's most likely tokens, on the device or on the host."""

    logprobs: torch.Tensor  # float32 [r]
    ranks: torch.Tensor  # int64 [r]; how many tokens are at least as likely, itself included
    top_token_ids: torch.Tensor  # int64 [r, num_top]; in any order where tokens tie
    top_logprobs: torch.Tensor  # float32 [r, num_top]

    def to_host(self) -> RankedTokens:
        """A copy in pinned memory, filled when the device has run all work enqueued so far; itself on the host."""
        tensors = (self.logprobs, self.ranks, self.top_token_ids, self.top_logprobs)
        return RankedTokens(*(to_host(tensor) for tensor in tensors))

    def read(self, num_top: Sequence[int]) -> list[TokenLogprobs]:
        """One entry per row, with up to `num_top` most likely tokens of that row."""
        tensors = (self.logprobs, self.ranks, self.top_token_ids, self.top_logprobs)
        columns = (*(tensor.tolist() for tensor in tensors), num_top)
        return [
            TokenLogprobs(logprob, tuple(zip(token_ids[:num], logprobs[:num], strict=True)), rank)
            for logprob, rank, token_ids, logprobs, num in zip(*columns, strict=True)
        ]


def rank_tokens(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> RankedTokens:
    """Log-probabilities and ranks of `token_ids`, and the `num_top` most likely tokens.

    logits: torch.float32 [r, vocab_size], not changed
    token_ids: torch.int64 [r]
    """
    num_top = min(num_top, logits.shape[1])
    parts = []
    batches = zip(logits.split(MAX_ROWS_AT_A_TIME), token_ids.split(MAX_ROWS_AT_A_TIME), strict=True)
    for some_logits, some_token_ids in batches:
        logprobs = some_logits.log_softmax(-1)
        top_logprobs, top_token_ids = logprobs.topk(num_top)
        own = logprobs.gather(1, some_token_ids[:, None])
        parts.append(RankedTokens(own.squeeze(1), (logprobs >= own).sum(1), top_token_ids, top_logprobs))
    return concatenate(parts)


def concatenate(parts: Iterable[RankedTokens]) -> RankedTokens:
    """All rows in order."""
    columns = zip(*((part.logprobs, part.ranks, part.top_token_ids, part.top_logprobs) for part in parts), strict=True)
    return RankedTokens(*(torch.cat(column) for column in columns))


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, filled when the device has run all work enqueued so far; itself on the host."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
