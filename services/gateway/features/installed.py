"""The features that a gateway has: whoever adds one adds it here."""

from __future__ import annotations

from collections.abc import Collection

from services.gateway.features.alignment import Alignment
from services.gateway.features.feature import Feature, HeldBytes, RequestSize
from services.gateway.features.hidden_states import HiddenStates
from services.gateway.features.pooling import Pooling
from services.gateway.features.progress import PromptProgress
from services.gateway.features.prompt_logprobs import PromptLogprobs
from services.gateway.features.report import Report
from services.gateway.features.returned_logits import ContextLogits, GenerationLogits
from services.pb import gateway_pb2

SOURCE_COPIES = 3  # of what an encoder reads: the client's message, the spec in the journal, and what is being sent


class Images(Feature):
    """The pictures of a prompt, which ask for it themselves: what the worker is told is known when they are decoded."""

    name = "images"
    field = "messages"  # of bodies; `GenerateRequest` has no such field
    goes_with_beams = True


class Source(Feature):
    """What the encoder of a model reads. It is no wish of the client: `read_request` makes it of the prompt."""

    name = "source"
    field = "sound"
    goes_with_beams = True

    def read(self, message: gateway_pb2.GenerateRequest, vocab_size: int) -> bytes | None:
        """Nothing: the prompt has not been tokenized yet."""
        return None

    def held(self, size: RequestSize) -> HeldBytes | None:
        """The input itself, for each answer."""
        return HeldBytes(SOURCE_COPIES * size.num_answers * len(size.spec.features[self.name]), "encoders' inputs")


PROMPT_LOGPROBS = PromptLogprobs()
POOLING = Pooling()
ALIGNMENT = Alignment()
SOURCE = Source()
IMAGES = Images()

FEATURES: tuple[Feature, ...] = (
    PROMPT_LOGPROBS,
    ContextLogits(),
    GenerationLogits(),
    HiddenStates(),
    POOLING,
    PromptProgress(),
    SOURCE,
    ALIGNMENT,
    IMAGES,
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
