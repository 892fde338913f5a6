"""`RequestState`: what the model runner keeps of a sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from services.grammar.matcher import GrammarMatcher
from services.step import SequenceSpec, TokenReport

if TYPE_CHECKING:  # it needs torch
    from services.dense_worker.features.prompt_embeds.loaded_table import LoadedTable


@dataclass(slots=True, eq=False)
class RequestState:
    """The runner's data about a sequence."""

    seq_id: int
    spec: SequenceSpec
    token_ids: list[int]  # all tokens known on the host, prompt first; `BatchRows` counts them while it has a slot
    num_logprobs: int | None = None  # as in the spec, or as many as its row policy chooses from
    reports_prompt_logprobs: bool = False  # asked for, and not reported yet
    token_report: TokenReport = TokenReport.NONE  # what is reported of each token
    has_forced_tokens: bool = False  # its tokens are those of `StepPlan.forced`, not the sampler's
    grammar: GrammarMatcher | None = None  # of the form of its output, if that has one
    slot: int | None = None  # of the sampler, and its row of `BatchRows`; None until it runs
    adapter_slot: int | None = None  # where its adapter is; None if it has none
    table: LoadedTable | None = None  # vectors for some of its prompt tokens; None: it has tokens only

    def fork(self, seq_id: int, position: int) -> RequestState:
        """A sequence with its first tokens, for which the same was asked. It has no slot yet."""
        assert self.grammar is None, "a fork would need a grammar of its own"
        return replace(self, seq_id=seq_id, token_ids=self.token_ids[:position], slot=None)
