"""The step as a value: `StepPlan` and `StepResult`, the same for all workers.

Nothing here needs torch, and only the codec knows the messages of gRPC.
"""

from services.step.answers import PlanAccepted, SequenceOpened
from services.step.plan import Fork, NewSequence, PlanEntry, StepPlan, positions_of, spans_of
from services.step.result import Logits, PromptLogprobs, StepResult

__all__ = [
    "Fork",
    "Logits",
    "NewSequence",
    "PlanAccepted",
    "PlanEntry",
    "PromptLogprobs",
    "SequenceOpened",
    "StepPlan",
    "StepResult",
    "positions_of",
    "spans_of",
]
