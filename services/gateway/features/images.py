"""Pictures in the prompt, which `services/gateway/images/` reads; each answer to the prompt has them."""

from __future__ import annotations

from services.gateway.features.feature import Feature
from services.pb import gateway_pb2


class Images(Feature):
    """Asked for by the pictures themselves."""

    name = "images"
    field = "messages"
    goes_with_beams = True

    def read(self, message: gateway_pb2.GenerateRequest, vocab_size: int) -> bytes | None:
        """None: what the dense worker is told is known when the pictures are decoded."""
        return None
