"""`Message`: one message of a chat, as chat templates expect it.

Agents send instructions in the middle of a conversation. Where a template refuses them there, they become texts of the
user, in their place, so that the prompt before them stays in the prefix cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.gateway.text.picture_text import parts_of


@dataclass(frozen=True, slots=True)
class MessageCall:
    """A call of a tool in a message of the assistant."""

    call_id: str
    name: str
    arguments: Any  # a dictionary; the client's text if that is no JSON object


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat; `role` as the chat template names it."""

    role: str
    content: str
    name: str = ""  # name of the speaker; empty: none
    calls: tuple[MessageCall, ...] = ()
    call_id: str = ""  # of the call that a tool's message answers
    reasoning: str = ""
    pictures: tuple[int, ...] = ()  # positions in the content; none: it is text alone

    def fields(self, is_none_without_text: bool = False, has_parts: bool = False) -> dict[str, Any]:
        """The message as a dictionary for the chat template, as in the documentation of transformers.

        `is_none_without_text`: a message that has only calls has the content None. `has_parts`: the content is a list
        of parts even without pictures.
        """
        content = parts_of(self.content, self.pictures) if self.pictures or has_parts else self.content
        fields: dict[str, Any] = {"role": self.role, "content": content}
        if self.name:
            fields["name"] = self.name
        if self.reasoning:  # templates use either name
            fields["reasoning_content"] = fields["reasoning"] = self.reasoning
        if self.call_id:
            fields["tool_call_id"] = self.call_id
        if self.calls:
            if is_none_without_text and not self.content:
                fields["content"] = None
            fields["tool_calls"] = [
                {"id": each.call_id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
                for each in self.calls
            ]
        return fields


# Whether a template takes a later message of the system is found out by these.
PROBE = (Message("user", "a"), Message("assistant", "b"), Message("system", "c"), Message("user", "d"))


def has_later_system_message(messages: Sequence[Message]) -> bool:
    """Whether a message of the system is not the first message."""
    return any(each.role == "system" for each in messages[1:])


def without_later_system_messages(messages: Sequence[Message]) -> list[Message]:
    """The same messages, those of the system after the first as messages of the user.

    Such a message and adjacent messages of the user become one, since many templates demand that roles alternate.
    """
    folded = [(messages[0], [messages[0].content])]
    for before, each in itertools.pairwise(messages):
        is_instruction = each.role == "system"
        is_beside_instruction = each.role == "user" and before.role == "system" and len(folded) > 1
        last, texts = folded[-1]
        if last.role == "user" and (is_instruction or is_beside_instruction):
            texts.append(each.content)
        else:
            folded.append((replace(each, role="user") if is_instruction else each, [each.content]))
    return [replace(message, content="\n".join(texts)) for message, texts in folded]
