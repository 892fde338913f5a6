"""`fit_bodies`: how large the body of an HTTP request may be, unless the configuration says it."""

from __future__ import annotations

from services.common.config import GatewaySection

MAX_BODY_BYTES = 2 * 2**20
# A photo of 12 MB in base64. No more, because the event loop parses a body in one go, hostile ones at 150 MB/s.
MAX_BODY_BYTES_WITH_PICTURES = 16 * 2**20


def fit_bodies(section: GatewaySection, *, sees_pictures: bool) -> GatewaySection:
    """The section with `max_body_bytes` for the model, if it has none."""
    if section.max_body_bytes is not None:
        return section
    return section.model_copy(
        update={"max_body_bytes": MAX_BODY_BYTES_WITH_PICTURES if sees_pictures else MAX_BODY_BYTES}
    )
