"""What the encoder of a model reads. It is no wish of the client: `read_request` makes it of the prompt."""

from __future__ import annotations

from services.gateway.features.feature import Feature, HeldBytes, RequestSize
from services.pb import gateway_pb2

_COPIES = 3  # the client's message, the spec that the journal holds, and what is being sent


class Source(Feature):
    """All answers to a prompt have it."""

    name = "source"
    field = "sound"
    goes_with_beams = True

    def read(self, message: gateway_pb2.GenerateRequest, vocab_size: int) -> bytes | None:
        """Nothing: the prompt has not been tokenized yet."""
        return None

    def held(self, size: RequestSize) -> HeldBytes | None:
        """The input itself, for each answer."""
        return HeldBytes(_COPIES * size.num_answers * len(size.spec.features[self.name]), "encoders' inputs")
