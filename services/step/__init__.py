"""The step as a value: `StepPlan` and `StepResult`, the same for all workers.

Nothing here needs torch, and only the codec knows the messages of gRPC.
"""

from services.step.plan import (
    NO_ENTRIES,
    NO_TOKENS,
    Fork,
    NewSequence,
    PlanEntries,
    PlanEntry,
    StepPlan,
    TokenColumns,
    positions_of,
    spans_of,
)
from services.step.result import NO_ROWS, PlanAccepted, RaggedTokens, Report, SequenceOpened, StepResult
from services.step.sequence_spec import PromptEmbedsRef, SequenceSpec, SourceRef

__all__ = [
    "NO_ENTRIES",
    "NO_ROWS",
    "NO_TOKENS",
    "Fork",
    "NewSequence",
    "PlanAccepted",
    "PlanEntries",
    "PlanEntry",
    "PromptEmbedsRef",
    "RaggedTokens",
    "Report",
    "SequenceOpened",
    "SequenceSpec",
    "SourceRef",
    "StepPlan",
    "StepResult",
    "TokenColumns",
    "positions_of",
    "spans_of",
]
