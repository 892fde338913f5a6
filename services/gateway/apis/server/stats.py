"""The answer to GET /stats."""

from __future__ import annotations

from typing_extensions import TypedDict

from services.gateway.link.worker_load import CacheLoad, RequestLoad


class Stats(TypedDict):
    """The current figures, at most a second old."""

    model: str
    unready_reason: str | None
    requests: RequestLoad | None
    kv_cache: CacheLoad | None
