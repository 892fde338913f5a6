"""The features that a gateway has: whoever adds one adds it here."""

from __future__ import annotations

from collections.abc import Collection

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
from services.pb import gateway_pb2

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


def read_features(message: gateway_pb2.GenerateRequest, vocab_size: int) -> dict[str, bytes]:
    """What a message asks the dense worker's features for, by their names; mostly nothing. Raises `InvalidRequest`."""
    given = {field.name for field, _ in message.ListFields()}
    read = {each.name: each.read(message, vocab_size) for each in FEATURES if each.field in given}
    return {name: asked for name, asked in read.items() if asked is not None}


def features_of(asked: Collection[str]) -> list[Feature]:
    """Those with these names, which a sequence has; mostly none."""
    return [each for each in FEATURES if each.name in asked] if asked else []
