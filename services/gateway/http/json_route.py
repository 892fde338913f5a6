"""JSON bodies read strictly: no NaN, no lone surrogates, no unbounded depth, nothing after the end."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException


class StrictJsonRoute(APIRoute):
    """A route whose body must be JSON; Python's own parser lets through what cannot be encoded again."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            if self.body_field is not None:
                _require_json_type(request)
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly


class _StrictRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        gc.disable()  # JSON makes no cycles: the collector would go through a million lists for nothing
        try:
            return from_json(body, allow_inf_nan=False, cache_strings="keys")
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from error
        finally:
            gc.enable()


def _require_json_type(request: Request) -> None:
    content_type = request.headers.get("content-type")
    if content_type is None:
        raise HTTPException(415, "there is no content-type, must be application/json")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, f"content-type is {content_type[:100]!r}, must be application/json")
