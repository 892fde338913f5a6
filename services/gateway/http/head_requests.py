"""Answers HEAD wherever GET is answered, with the same headers (RFC 9110, section 9.3.2): many probes send HEAD."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class HeadRequests:
    """An ASGI middleware. The application sees a GET; uvicorn, which knows the real method, sends no body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)
