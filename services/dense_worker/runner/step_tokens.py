"""The results of a step: `PendingTokens`, which are being copied from the device and become a `StepResult`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import accumulate, compress

import numpy as np
import torch

from services.common.token_logprobs import TokenLogprobs
from services.dense_worker.features.step_part import StepPart
from services.dense_worker.runner.batch_rows import BatchRows
from services.dense_worker.runner.step_hook import FollowUp
from services.dense_worker.runner.step_input import BoundPlan
from services.dense_worker.sampling.logprobs import RankedTokens
from services.step import PlanEntries, RaggedTokens, StepResult


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Tensors on the host that the device fills when it runs the step."""

    bound: BoundPlan
    rows: BatchRows  # get the tokens
    token_ids: torch.Tensor  # int64 [num_sampled], of every row whose logits the plan needs
    num_logprobs: Mapping[int, int]  # most likely tokens to report with the sampled one, by index in `token_ids`
    ranked: RankedTokens | None  # one row for each of `num_logprobs`; None if that is empty
    parts: Collection[StepPart] = ()  # what features do in the step
    sampled: torch.Tensor | None = None  # `token_ids` on the device; None: the step samples no token
    follow_up: FollowUp | None = None  # what follows the step; None: nothing
    follow_up_s: float = 0.0  # how long that took, if that is known already

    def read(self) -> StepResult:
        """The step's result; also stores the tokens in the sequences. The device must have run the step."""
        entries = self.bound.plan.entries
        sampled = self.token_ids.numpy()
        if entries.drafts:
            tokens = _without_wrong_drafts(entries, sampled)
        else:
            tokens = RaggedTokens(sampled.copy(), entries.num_logits)  # what was sampled may lie in memory of its own
        self._keep(tokens)
        if self.follow_up is not None:
            self.follow_up.read()
        result = StepResult(
            tokens,
            {} if self.ranked is None else self._read_logprobs(self.ranked, tokens),
            follow_up_s=self.follow_up_s,
        )
        for part in self.parts:
            part.read(result)
        return result

    def _keep(self, tokens: RaggedTokens) -> None:
        """Appends the tokens to sequences that still have their slots, unless the scheduler chooses theirs."""
        batch, rows = self.bound.batch, self.rows
        is_same = rows.version == batch.version and not len(batch.forced)
        if is_same and len(tokens.token_ids) == len(batch.slots) == np.count_nonzero(tokens.counts):
            rows.append(batch.slots, batch.token_lists, tokens.token_ids)
            return
        gets_tokens, counts = rows.serials[batch.slots] == batch.serials, tokens.counts
        gets_tokens[batch.forced] = False
        gets_one = gets_tokens & (counts == 1)
        if gets_one.any():
            token_ids = tokens.token_ids[gets_one.repeat(counts)]
            rows.append(batch.slots[gets_one], compress(batch.token_lists, gets_one.tolist()), token_ids)
        for index in (gets_tokens & (counts > 1)).nonzero()[0].tolist():
            rows.extend(batch.sequences[index], tokens.of(index))

    def _read_logprobs(self, ranked: RankedTokens, tokens: RaggedTokens) -> dict[int, list[TokenLogprobs]]:
        """Those of accepted tokens, by seq_id."""
        entries = self.bound.plan.entries
        firsts, found = np.cumsum(entries.num_logits) - entries.num_logits, dict[int, list[TokenLogprobs]]()
        values = ranked.read(list(self.num_logprobs.values()))
        of_rows = np.searchsorted(firsts, list(self.num_logprobs), side="right") - 1
        for row, index, value in zip(self.num_logprobs, of_rows.tolist(), values, strict=True):
            if row - firsts[index] < tokens.counts[index]:
                found.setdefault(entries.seq_ids.item(index), []).append(value)
        return found


def _without_wrong_drafts(entries: PlanEntries, sampled: np.ndarray) -> RaggedTokens:
    """The sampled tokens that count. sampled: int64 [num_sampled]"""
    token_ids, counts = sampled.tolist(), entries.num_logits.tolist()
    ends = list(accumulate(counts))
    for index in sorted(entries.drafts, reverse=True):  # so that the tokens of those before it stay at their places
        end = ends[index]
        first = end - counts[index]
        num_right = len(verify(entries.drafts[index], token_ids[first:end]))
        del token_ids[first + num_right : end]
        counts[index] = num_right
    return RaggedTokens(np.array(token_ids, np.int64), np.array(counts, np.int64))


def verify(draft_token_ids: SequenceOf[int], sampled: list[int]) -> list[int]:
    """The sampled tokens that count: a row after a draft counts only if the sampler chose that draft."""
    for index, draft in enumerate(draft_token_ids):
        if sampled[index] != draft:
            return sampled[: index + 1]
    return sampled
