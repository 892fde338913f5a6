"""What the routes of several dialects do and declare alike."""

from __future__ import annotations

from fastapi import Request

from services.pb import gateway_pb2

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


def traced(messages: list[gateway_pb2.GenerateRequest], request: Request) -> list[gateway_pb2.GenerateRequest]:
    """Adds the caller's trace context to the messages, if the request has one."""
    for message in messages:
        message.traceparent = request.headers.get("traceparent", "")
    return messages
