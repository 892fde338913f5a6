"""Log-probabilities of the model itself: log_softmax of its logits, in float32.

They are computed on the device, only for the requested tokens; the host reads a few numbers per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn import functional as F

from services.common.token_logprobs import TokenLogprobs
from services.dense_worker.sampling.upload import upload

_ALIGNED_COLUMNS = 4  # of float32
MAX_ROWS_AT_A_TIME = 64  # of log_softmax, which takes as much memory as the logits


@dataclass(frozen=True, slots=True)
class RankedTokens:
    """Log-probabilities of one token per row and of the row's most likely tokens, on the device or on the host."""

    logprobs: torch.Tensor  # float32 [r]
    ranks: torch.Tensor  # int64 [r]; how many tokens are at least as likely, itself included
    top_token_ids: torch.Tensor  # int64 [r, num_top]; in any order where tokens tie
    top_logprobs: torch.Tensor  # float32 [r, num_top]
    named_logprobs: torch.Tensor  # float32 [r, most named tokens of a row]; arbitrary behind a row's own
    named: Sequence[Sequence[int]]  # token ids that a request names, by row; always on the host

    def to_host(self) -> RankedTokens:
        """A copy in pinned memory, filled when the device has run all work enqueued so far; itself on the host."""
        tensors = (self.logprobs, self.ranks, self.top_token_ids, self.top_logprobs, self.named_logprobs)
        return RankedTokens(*(to_host(tensor) for tensor in tensors), self.named)

    def read(self, num_top: Sequence[int]) -> list[TokenLogprobs]:
        """One entry per row, with up to `num_top` most likely tokens of that row, then those that it names."""
        tensors = (self.logprobs, self.ranks, self.top_token_ids, self.top_logprobs)
        columns = (*(tensor.tolist() for tensor in tensors), num_top)
        found = [
            TokenLogprobs(logprob, tuple(zip(token_ids[:num], logprobs[:num], strict=True)), rank)
            for logprob, rank, token_ids, logprobs, num in zip(*columns, strict=True)
        ]
        if not self.named_logprobs.shape[1]:
            return found
        named = zip(self.named, self.named_logprobs.tolist(), strict=True)
        return [
            replace(each, top=(*each.top, *zip(token_ids, logprobs, strict=False)))
            for each, (token_ids, logprobs) in zip(found, named, strict=True)
        ]


def rank_tokens(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_top: int,
    named: Sequence[Sequence[int]] | None = None,
    num_named: int = 0,
) -> RankedTokens:
    """Log-probabilities and ranks of `token_ids`, the `num_top` most likely tokens, and log-probabilities of `named`.

    logits: [r, vocab_size], of any float type, not changed
    token_ids: torch.int64 [r]
    named: further token ids by row, of which the result has room for at least `num_named`; None: there are none
    """
    num_top = min(num_top, logits.shape[1])
    named = [()] * len(logits) if named is None else named
    named_ids = _upload_named(named, max(num_named, *map(len, named), 0), logits.device)
    parts = []
    # Rows begin at multiples of 16 bytes: on a GPU, torch's order of additions depends on where a row begins.
    num_missing = -logits.shape[1] % _ALIGNED_COLUMNS
    for start in range(0, len(logits), MAX_ROWS_AT_A_TIME):
        rows = slice(start, start + MAX_ROWS_AT_A_TIME)
        some = logits[rows].float()
        some = F.pad(some, (0, num_missing), value=-torch.inf) if num_missing else some
        logprobs = some.log_softmax(-1)
        top_logprobs, top_token_ids = logprobs.topk(num_top)
        own = logprobs.gather(1, token_ids[rows, None])
        ranks = (logprobs >= own).sum(1)
        named_logprobs = logprobs.gather(1, named_ids[rows])
        parts.append(
            RankedTokens(own.squeeze(1), ranks, top_token_ids, top_logprobs, named_logprobs, named[rows])
        )
    return concatenate(parts)


def _upload_named(named: Sequence[Sequence[int]], width: int, device: torch.device) -> torch.Tensor:
    """int64 [r, width]; 0 behind a row's own."""
    if not width:
        return torch.empty(len(named), 0, dtype=torch.int64, device=device)
    return upload(np.array([[*each, *[0] * (width - len(each))] for each in named], dtype=np.int64), device)


def concatenate(parts: Iterable[RankedTokens]) -> RankedTokens:
    """All rows in order; the parts have as many most likely and named tokens."""
    parts = list(parts)
    if len(parts) == 1:
        return parts[0]
    columns = zip(
        *((part.logprobs, part.ranks, part.top_token_ids, part.top_logprobs, part.named_logprobs) for part in parts),
        strict=True,
    )
    return RankedTokens(*(torch.cat(column) for column in columns), [each for part in parts for each in part.named])


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, filled when the device has run all work enqueued so far; itself on the host."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
