"""What the routes of several dialects have alike: routers for bodies of JSON, and the events of streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter

from services.gateway.core.request_service import RequestService
from services.gateway.http.errors import ERROR_RESPONSES
from services.gateway.http.json_route import NoteBody, json_route

EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
    "description": "If stream was set",
}
STREAM_CONTENT = {"text/event-stream": {"schema": EVENT}}
NAMED_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["event", "data"],
    "description": "If stream was set; `event` is the type of the object in `data`",
}
NAMED_STREAM_CONTENT = {"text/event-stream": {"schema": NAMED_EVENT}}


def streamed(
    model: Any, content: Mapping[str, Any] = STREAM_CONTENT, description: str = "The answer"
) -> dict[int | str, dict[str, Any]]:
    """What a route declares that answers with an object of `model`, or a stream with this `content`."""
    return {200: {"model": model, "content": content, "description": description}}


def json_router(
    service: RequestService,
    tag: str,
    error_responses: Mapping[int | str, dict[str, Any]] = ERROR_RESPONSES,
    *,
    note_body: NoteBody | None = None,
    needs_json_type: bool = True,
) -> APIRouter:
    """A router whose routes read bodies of JSON, and make their responses themselves: see `json_route`.

    `tag`: where /openapi.json lists them. `error_responses`: the errors in the form of their dialect.
    """
    section, heavy_work = service.section, service.heavy_work
    route_class = json_route(section.max_body_values, heavy_work, note_body, needs_json_type=needs_json_type)
    return APIRouter(route_class=route_class, tags=[tag], responses=dict(error_responses))
