"""Makes the source of drafts that the config names."""

from __future__ import annotations

from services.common.config import SchedulerSection
from services.dense_worker.engine.speculation.answer_history import AnswerHistory
from services.dense_worker.engine.speculation.speculation import Speculation
from services.dense_worker.engine.speculation.step_costs import StepCosts

# Few lengths, because each takes memory and time; a longer match tells more about how a text goes on.
SUFFIX_LENGTHS = (3, 6, 12)


def make_draft_source(section: SchedulerSection) -> Speculation | None:
    """The source of `scheduler.speculation`; None if that is off."""
    if section.speculation == "off":
        return None
    costs = StepCosts(section.max_num_seqs, section.max_num_batched_tokens)
    if section.speculation == "ngram":
        lengths = range(section.prompt_lookup_min, section.prompt_lookup_max + 1)
        return Speculation(lengths, section.num_speculative_tokens, costs)
    history = AnswerHistory(SUFFIX_LENGTHS, section.suffix_cached_tokens)
    return Speculation(SUFFIX_LENGTHS, section.num_speculative_tokens, costs, history)
