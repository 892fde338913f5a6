"""Lets every route have a prefix, `gateway.root_path`, for a proxy that passes its own prefix on."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """The outermost ASGI middleware: all others see paths without the prefix. A path that has none stays as it is."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if self._root_path and f"{path}/".startswith(f"{self._root_path}/"):
            scope = {**scope, "path": path.removeprefix(self._root_path) or "/"}
        await self._app(scope, receive, send)
