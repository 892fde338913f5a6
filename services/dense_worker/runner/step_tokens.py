"""The results of a step: `PendingTokens`, which are being copied from the device and become a `StepResult`."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from services.common.token_logprobs import TokenLogprobs
from services.dense_worker.runner.guesses import PendingGuesses
from services.dense_worker.runner.known_sequence import KnownSequence
from services.dense_worker.runner.step_logits import PendingLogits
from services.dense_worker.sampling.logprobs import RankedTokens
from services.dense_worker.sampling.prompt_logprobs import RankedSpans
from services.grammar.matcher import GrammarMatcher
from services.step import Logits, PlanEntries, RaggedTokens, StepResult


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Tensors on the host that the device fills when it runs the step."""

    entries: PlanEntries
    sequences: SequenceOf[KnownSequence]  # aligned with the entries
    token_ids: torch.Tensor  # int64 [num_sampled], of every row whose logits the plan needs
    num_logprobs: Mapping[int, int]  # most likely tokens to report with the sampled one, by index in `token_ids`
    ranked: RankedTokens | None  # one row for each of `num_logprobs`; None if that is empty
    prompt_ranked: RankedSpans | None  # of the step's spans of prompts; None if there are none
    logits: PendingLogits | None = None  # that are reported; None: none
    sampled: torch.Tensor | None = None  # `token_ids` on the device; None: the step samples no token
    guesses: PendingGuesses | None = None  # of the tokens after these; None: nobody asks for any
    guess_s: float = 0.0  # how long the guesses took, if that is known already

    def read(self) -> StepResult:
        """The step's result; also stores the tokens in the sequences. The device must have run the step."""
        sampled = self.token_ids.tolist()
        ranked: dict[int, TokenLogprobs] = {}
        if self.ranked is not None:
            ranked = dict(zip(self.num_logprobs, self.ranked.read(list(self.num_logprobs.values())), strict=True))
        token_ids: list[SequenceOf[int]] = []
        logprobs: dict[int, list[TokenLogprobs]] = {}
        formed: list[tuple[int, GrammarMatcher, int]] = []  # seq_id, grammar and token
        logits: list[Logits] = []
        first = 0
        for entry, sequence in zip(self.entries, self.sequences, strict=True):
            accepted = verify(entry.draft_token_ids, sampled[first : first + entry.num_logits])
            if not sequence.new.has_chosen_tokens:
                sequence.token_ids += accepted
            token_ids.append(accepted)
            if sequence.grammar is not None:
                formed += [(entry.seq_id, sequence.grammar, token_id) for token_id in accepted]
            if first in ranked and accepted:
                logprobs[entry.seq_id] = [ranked[first + index] for index in range(len(accepted))]
            if self.logits is not None and accepted:
                start = len(sequence.token_ids) - len(accepted) - sequence.new.num_prompt_tokens
                found = self.logits.read_sampled(entry.seq_id, start, first, len(accepted))
                logits += () if found is None else (found,)
            first += entry.num_logits
        prompt_logprobs = [] if self.prompt_ranked is None else self.prompt_ranked.read()
        prompt_logits = [] if self.logits is None else self.logits.read_prompts()
        ended = _follow(formed) if formed else {}
        guesses = {} if self.guesses is None else self.guesses.read()
        ragged = RaggedTokens.of(token_ids)
        return StepResult(ragged, logprobs, prompt_logprobs, ended, logits, prompt_logits, guesses, self.guess_s)


def _follow(formed: list[tuple[int, GrammarMatcher, int]]) -> dict[int, str | None]:
    """Moves the grammars by their tokens; see `StepResult.ended`."""
    GrammarMatcher.consume([(grammar, token_id) for _, grammar, token_id in formed])
    return {
        seq_id: grammar.error and f"the form of the output cannot be followed: {grammar.error}"
        for seq_id, grammar, _ in formed
        if not grammar.is_running
    }


def verify(draft_token_ids: SequenceOf[int], sampled: list[int]) -> list[int]:
    """The sampled tokens that count: a row after a draft counts only if the sampler chose that draft."""
    for index, draft in enumerate(draft_token_ids):
        if sampled[index] != draft:
            return sampled[: index + 1]
    return sampled
