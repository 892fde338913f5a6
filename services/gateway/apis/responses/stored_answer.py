"""`StoredAnswer`: a stored response as the answer to a request."""

from __future__ import annotations

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.apis.responses.response_store import StoredResponse


class StoredAnswer(Response):
    """Its bytes are those in the store, however many clients read them."""

    media_type = "application/json"

    def __init__(self, stored: StoredResponse) -> None:
        super().__init__(headers={"content-length": str(sum(map(len, stored.response)))})
        self._pieces = stored.response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
