"""`TextServer`: who answers the bodies of Text Generation Inference at paths that other dialects have, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import Response

from services.gateway.apis.shared.request_model import RequestModel


class TextServer(Protocol):
    """Its bodies have `inputs`."""

    body: type[RequestModel]

    async def answer(self, body: Any, request: Request, *, is_list: bool = False) -> Response:
        """The answer, or a stream of its tokens. `is_list`: the answer is in a list, as at /."""

    def info(self) -> Mapping[str, Any]:
        """The model and the limits of requests."""
