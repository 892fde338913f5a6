"""The parts of messages: how many there may be, and which kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Discriminator, Field
from pydantic_core import PydanticCustomError

from services.gateway.text.read_chat import MAX_NAME_CHARACTERS
from services.gateway.text.tools.tool import MAX_DESCRIPTION_CHARACTERS, NAME

MAX_PARTS = 1024  # of one message
MAX_CHAT_PARTS = 4096  # of all messages of a chat
LISTS = ("content", "output", "summary", "tools")  # fields of a message, item or block that may be lists of parts

CallId = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]
ToolName = Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
Description = Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARACTERS)]


def check_parts(messages: Any) -> Any:
    """Counts the parts of all messages, also parts of parts, before any of them is checked."""
    if isinstance(messages, list) and (count := _num_parts(messages)) > MAX_CHAT_PARTS:
        context = {"count": count, "most": MAX_CHAT_PARTS}
        raise PydanticCustomError("too_many", "there are {count} parts in all, at most {most} allowed", context)
    return messages


def by_field(field: str, kinds: str, default: str = "") -> Discriminator:
    """Chooses the model by the value of `field`: the one with the tag `<value>`. `kinds` tells the allowed values."""

    def tag(value: Any) -> str:
        kind = value.get(field) if isinstance(value, Mapping) else getattr(value, field, None)
        return f"<{default if kind is None else kind}>"

    return Discriminator(
        tag, custom_error_type="kind", custom_error_message=f"{field} must be {kinds}; others are not supported"
    )


def by_shape() -> Discriminator:
    """`<texts>` for a list, else `<text>`."""
    return Discriminator(lambda value: "<texts>" if isinstance(value, list) else "<text>")


def _num_parts(parts: list[Any]) -> int:
    count = 0
    for part in parts:
        if isinstance(part, dict):
            for name in LISTS:
                if isinstance(inner := part.get(name), list):
                    count += len(inner) + _num_parts(inner)
    return count
