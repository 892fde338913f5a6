"""`KnownSequence`: what the model runner keeps of a sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.dense_worker.prompts.loaded_table import LoadedTable
from services.dense_worker.token_tails import TokenTails
from services.grammar.matcher import GrammarMatcher
from services.step import NewSequence


@dataclass(slots=True, eq=False)
class KnownSequence:
    """The runner's data about a sequence."""

    new: NewSequence
    token_ids_before: list[int]  # without those in `tails`
    grammar: GrammarMatcher | None = None  # of the form of its output, if that has one
    slot: int | None = None  # of the sampler, and its row of `BatchRows`; None until it runs
    adapter_slot: int | None = None  # where its adapter is; None if it has none
    table: LoadedTable | None = None  # vectors for some of its prompt tokens; None: it has tokens only
    tails: TokenTails | None = field(default=None, repr=False)  # of its newest tokens, while it has a slot

    @property
    def token_ids(self) -> list[int]:
        """All tokens known on the host, prompt first. Only read: `BatchRows` counts them."""
        if self.tails is not None:
            assert self.slot is not None, "it has a tail as long as it has a slot"
            self.tails.flush(self.slot)
        return self.token_ids_before
