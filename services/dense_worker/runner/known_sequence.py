"""`KnownSequence`: what the model runner keeps of a sequence."""

from __future__ import annotations

from dataclasses import dataclass

from services.dense_worker.prompts.loaded_table import LoadedTable
from services.grammar.matcher import GrammarMatcher
from services.step import NewSequence


@dataclass(slots=True, eq=False)
class KnownSequence:
    """The runner's data about a sequence."""

    new: NewSequence
    token_ids: list[int]  # all tokens known on the host, prompt first; `BatchRows` counts them while it has a slot
    grammar: GrammarMatcher | None = None  # of the form of its output, if that has one
    slot: int | None = None  # of the sampler, and its row of `BatchRows`; None until it runs
    adapter_slot: int | None = None  # where its adapter is; None if it has none
    table: LoadedTable | None = None  # vectors for some of its prompt tokens; None: it has tokens only
