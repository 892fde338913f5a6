"""What a route that renders prompts answers: a body of vLLM's /inference/v1/generate."""

from __future__ import annotations

from typing import Any

from typing_extensions import TypedDict


class RenderedPrompt(TypedDict):
    """A body of /inference/v1/generate."""

    request_id: str
    model: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    stream: bool
    stream_options: dict[str, Any] | None
    cache_salt: str | None
    priority: int
