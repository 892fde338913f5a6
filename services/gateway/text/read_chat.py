"""Reads and checks the `Chat` of a gRPC message before its template runs."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from services.common.errors import InvalidRequest
from services.gateway.text.chat_template import Chat, Message
from services.pb import gateway_pb2

MAX_NAME_CHARACTERS = 64  # of a speaker's name and of a role
MAX_TEMPLATE_KWARGS_BYTES = 16 * 2**10  # as JSON
MAX_TEMPLATE_KWARGS_DEPTH = 8


def read_chat(chat: gateway_pb2.Chat) -> Chat:
    """The chat of a message. Raises `InvalidRequest` for the first error."""
    messages = [Message(each.role, each.content, each.name) for each in chat.messages]
    if not messages:
        raise InvalidRequest("chat has no messages, at least 1 is required", "messages")
    for i, each in enumerate(messages):
        if not each.role or not (each.content or each.role == "assistant"):
            raise InvalidRequest(f"chat message {i} has no {'content' if each.role else 'role'}", "messages")
        for field, name in (("role", each.role), ("name", each.name)):
            if len(name) > MAX_NAME_CHARACTERS:
                raise InvalidRequest(
                    f"messages[{i}].{field} has {len(name)} characters, at most {MAX_NAME_CHARACTERS} allowed",
                    f"messages[{i}].{field}",
                )
    continues = chat.continue_final_message
    return Chat(
        messages,
        chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not continues,
        continues,
        _read_template_kwargs(chat.chat_template_kwargs),
    )


def _read_template_kwargs(text: str) -> dict[str, Any]:
    field = "chat_template_kwargs"
    if not text:
        return {}
    num_bytes = len(text.encode())
    if num_bytes > MAX_TEMPLATE_KWARGS_BYTES:
        raise InvalidRequest(f"{field} has {num_bytes} bytes, at most {MAX_TEMPLATE_KWARGS_BYTES} allowed", field)
    try:
        values = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"{field} is not JSON: {error}", field) from error
    if not isinstance(values, dict):
        raise InvalidRequest(f"{field} is not a JSON object", field)
    if (depth := _depth(values)) > MAX_TEMPLATE_KWARGS_DEPTH:
        raise InvalidRequest(f"{field} is nested {depth} deep, at most {MAX_TEMPLATE_KWARGS_DEPTH} allowed", field)
    return values


def _depth(value: Any) -> int:
    """The depth of nested lists and objects; the parser limits it."""
    if not isinstance(value, list | dict):
        return 0
    return 1 + max(map(_depth, value.values() if isinstance(value, dict) else value), default=0)
