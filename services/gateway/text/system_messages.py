"""Instructions in the middle of a conversation, for chat templates that refuse them there.

Agents send them. They become texts of the user, in their place, so that the prompt before them stays in the prefix
cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from services.gateway.text.chat_message import Message

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
