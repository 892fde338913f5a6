"""The parts of messages: how many there may be, and which kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import pydantic
from pydantic import Discriminator, Field
from pydantic_core import PydanticCustomError

from services.gateway.text.read_chat import MAX_NAME_CHARACTERS
from services.gateway.text.tools.tool import MAX_DESCRIPTION_CHARACTERS, NAME

MAX_PARTS = 1024  # of one message
MAX_CHAT_PARTS = 4096  # of all messages of a chat
LISTS = ("content", "output", "summary", "tools")  # fields of a message, item or block that may be lists of parts

_FILMS = "there are no films in chats, send pictures of them"
_SOUND = "there is no sound in chats, /v1/audio/transcriptions of a speech model takes it"
_FILES = "there are no files in chats, send their text, or pictures of their pages"
_VECTORS = "pictures are sent as files, not as vectors"
UNREAD: Mapping[str, str] = {  # kinds of parts that other servers know
    **dict.fromkeys(("input_video", "video", "video_url"), _FILMS),
    **dict.fromkeys(("audio", "audio_embeds", "audio_url", "input_audio"), _SOUND),
    **dict.fromkeys(("container_upload", "document", "file", "input_file"), _FILES),
    "image_embeds": _VECTORS,
}

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


def _readable(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in UNREAD:
        context = {"kind": kind, "reason": UNREAD[kind]}
        raise PydanticCustomError("kind", "type is {kind}: {reason}", context)
    return part


readable = pydantic.BeforeValidator(_readable)  # of a part, before its kind is looked up


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
