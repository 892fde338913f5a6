"""The OpenAPI document at /openapi.json. Making it takes a quarter of a second, in a thread, for the first reader."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import FastAPI
from fastapi.responses import Response
from pydantic_core import to_json
from starlette.requests import Request

from services.gateway.http.errors import Dialect, error_schemas


def add_document(app: FastAPI, dialects: Sequence[Dialect]) -> None:
    """Adds the route of the document, which describes all other routes of `app`."""
    lock = asyncio.Lock()
    body: bytes | None = None

    async def openapi_document(request: Request) -> Response:
        nonlocal body
        async with lock:
            if body is None:
                body = await asyncio.to_thread(_make_document, app, dialects)
        return Response(body, media_type="application/json")

    app.add_route("/openapi.json", openapi_document, include_in_schema=False)


def _make_document(app: FastAPI, dialects: Sequence[Dialect]) -> bytes:
    document = app.openapi()
    document["components"]["schemas"].update(error_schemas(dialects))
    for path in document["paths"].values():
        for operation in path.values():
            # FastAPI documents a 422 for invalid bodies: this server answers with a 400.
            operation["responses"].pop("422", None)
    return to_json(document)
