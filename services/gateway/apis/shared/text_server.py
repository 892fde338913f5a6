"""`TextServer`: who answers the bodies of Text Generation Inference at paths that other dialects have, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import Response
from typing_extensions import TypedDict

from services.gateway.apis.shared.request_model import RequestModel


class TextServerInfo(TypedDict):
    """The served model and the limits of requests."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    model_pipeline_tag: str
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    max_client_batch_size: int
    router: str
    version: str


class TextServer(Protocol):
    """Its bodies have `inputs`."""

    body: type[RequestModel]
    error_responses: Mapping[int | str, dict[str, Any]]

    def is_meant(self, body: Any) -> bool:
        """Whether a body at /generate is one of these, and not SGLang's."""

    def note_body(self, request: Request, body: Any) -> None:
        """Lets errors be of this dialect if the body is. To be called before it is read (with None) and checked."""

    async def answer(self, body: Any, request: Request, *, is_list: bool = False) -> Response:
        """The answer, or a stream of its tokens. `is_list`: the answer is in a list, as at /."""

    def info(self) -> TextServerInfo:
        """The model and the limits of requests."""
