"""Makes conversations such as Harmony's chat templates can render.

These templates render one call of a tool in a message and the result that follows it, they have no place for a text
beside a call, and they leave out messages of the system behind the first message.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from services.gateway.text.chat_message import Message, without_later_system_messages


def harmony_fields(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as dictionaries for the chat template: each call in a message of its own, before its result."""
    found: list[dict[str, Any]] = []
    given = without_later_system_messages(messages)
    index = 0
    while index < len(given):
        message = given[index]
        index += 1
        if not message.calls:
            found.append(_fields(message))
            continue
        end = index
        while end < len(given) and given[end].role == "tool":
            end += 1
        found += map(_fields, _one_by_one(message, given[index:end]))
        index = end
    return found


def _one_by_one(message: Message, results: Sequence[Message]) -> list[Message]:
    """A message with calls and the results behind it, as pairs of a call and its result. Others come last."""
    left = dict(enumerate(results))
    indices = defaultdict[str, deque[int]](deque)  # of the results, by call_id
    for index, result in left.items():
        indices[result.call_id].append(index)
    pairs = list[Message]()
    for i, call in enumerate(message.calls):
        thoughts = [message.reasoning, message.content] if i == 0 else []
        reasoning = "\n".join(filter(None, thoughts))
        pairs.append(replace(message, content="", reasoning=reasoning, calls=(call,)))
        if indices[call.call_id]:
            pairs.append(left.pop(indices[call.call_id].popleft()))
    return [*pairs, *left.values()]


def _fields(message: Message) -> dict[str, Any]:
    fields = message.fields()
    if message.reasoning:
        fields["thinking"] = message.reasoning
    return fields
