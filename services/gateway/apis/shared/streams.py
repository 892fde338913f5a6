"""What the routes of several dialects declare alike: the events of streams."""

from __future__ import annotations

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
