"""What a step yields: `PendingTokens` on their way from the device, `StepTokens` as the engine reads them."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch

from services.common.token_logprobs import TokenLogprobs
from services.dense_worker.logprobs import RankedTokens
from services.dense_worker.prompt_logprobs import PromptLogprobs, PromptStretch, read_prompt_logprobs


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Plain numbers."""

    token_ids: list[int]  # of the plan's sampled entries, in batch order
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by seq_id, of those that want them
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Tensors on the host, which the device fills when it runs the step."""

    token_ids: torch.Tensor  # int64 [num_sampled]
    num_logprobs: dict[int, int]  # likeliest tokens wanted beside the sampled one, by seq_id, in batch order
    ranked: RankedTokens | None  # one row for each of `num_logprobs`; None where that is empty
    stretches: SequenceOf[PromptStretch]
    prompt_ranked: RankedTokens | None  # one row for each token of `stretches`; None where these are empty

    def read(self) -> StepTokens:
        """Not before the device has run the step."""
        logprobs: dict[int, TokenLogprobs] = {}
        if self.ranked is not None:
            tokens = self.ranked.read(list(self.num_logprobs.values()))
            logprobs = dict(zip(self.num_logprobs, tokens, strict=True))
        prompt_logprobs = [] if self.prompt_ranked is None else read_prompt_logprobs(self.stretches, self.prompt_ranked)
        return StepTokens(self.token_ids.tolist(), logprobs, prompt_logprobs)
