"""Makes the source of drafts that the config names."""

from __future__ import annotations

from services.common.config import SchedulerSection
from services.dense_worker.draft_model.draft_blocks import MAX_LATE_TOKENS
from services.dense_worker.engine.speculation.answer_history import AnswerHistory
from services.dense_worker.engine.speculation.copied_text import CopiedText
from services.dense_worker.engine.speculation.head_guesses import HeadGuesses
from services.dense_worker.engine.speculation.model_guesses import ModelGuesses
from services.dense_worker.engine.speculation.speculation import GuessSource, Speculation
from services.dense_worker.engine.speculation.step_costs import StepCosts

# Few lengths, because each takes memory and time; a longer match tells more about how a text goes on.
SUFFIX_LENGTHS = (3, 6, 12)


def make_draft_source(section: SchedulerSection, num_heads: int) -> Speculation | None:
    """The source of `scheduler.speculation`; None if that is off. num_heads: that the model has"""
    if section.speculation == "off":
        return None
    costs = StepCosts(section.max_num_seqs, section.max_num_batched_tokens)
    return Speculation(make_guess_source(section, num_heads), section.num_speculative_tokens, costs)


def make_guess_source(section: SchedulerSection, num_heads: int) -> GuessSource:
    """What guesses, unless speculation is off."""
    if section.speculation == "medusa":
        return HeadGuesses(num_heads)
    if section.speculation == "draft_model":
        return ModelGuesses(section.num_speculative_tokens, MAX_LATE_TOKENS)
    if section.speculation == "eagle3":
        return ModelGuesses(section.num_speculative_tokens, max_late_tokens=None)
    if section.speculation == "ngram":
        return CopiedText(range(section.prompt_lookup_min, section.prompt_lookup_max + 1))
    return CopiedText(SUFFIX_LENGTHS, AnswerHistory(SUFFIX_LENGTHS, section.suffix_cached_tokens))
