"""The step as a value: `StepPlan` and `StepResult`, alike for all workers. No torch; messages in the codec alone."""

from services.step.answers import PlanAccepted, SequenceOpened
from services.step.plan import Fork, NewSequence, PlanEntry, StepPlan, spans_of
from services.step.result import PromptLogprobs, StepResult

__all__ = [
    "Fork",
    "NewSequence",
    "PlanAccepted",
    "PlanEntry",
    "PromptLogprobs",
    "SequenceOpened",
    "StepPlan",
    "StepResult",
    "spans_of",
]
