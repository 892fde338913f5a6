"""Pictures in the prompt, which `services/gateway/images/` reads; each answer to the prompt has them."""

from __future__ import annotations

from services.gateway.features.feature import Feature


class Images(Feature):
    """Asked for by the pictures themselves: what the dense worker is told is known when they are decoded."""

    name = "images"
    field = "messages"  # of bodies; `GenerateRequest` has no such field
    goes_with_beams = True
