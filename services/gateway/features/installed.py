"""The features that a gateway has: whoever adds one adds it here."""

from __future__ import annotations

from services.gateway.features.alignment import Alignment
from services.gateway.features.feature import Feature
from services.gateway.features.hidden_states import HiddenStates
from services.gateway.features.images import Images
from services.gateway.features.pooling import Pooling
from services.gateway.features.progress import PromptProgress
from services.gateway.features.prompt_logprobs import PromptLogprobs
from services.gateway.features.report import Report
from services.gateway.features.returned_logits import ContextLogits, GenerationLogits
from services.gateway.features.source import Source
from services.step.sequence_spec import SequenceSpec

PROMPT_LOGPROBS = PromptLogprobs()
POOLING = Pooling()
ALIGNMENT = Alignment()

FEATURES: tuple[Feature, ...] = (
    PROMPT_LOGPROBS,
    ContextLogits(),
    GenerationLogits(),
    HiddenStates(),
    POOLING,
    PromptProgress(),
    Source(),
    ALIGNMENT,
    Images(),
)
REPORTS = {each.name: each for each in FEATURES if isinstance(each, Report)}


def features_of(spec: SequenceSpec) -> list[Feature]:
    """Those that a sequence has; mostly none."""
    return [each for each in FEATURES if each.name in spec.features] if spec.features else []
