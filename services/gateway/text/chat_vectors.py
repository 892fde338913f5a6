"""Vectors within the messages of a chat: placeholders stand for them while the template runs.

A placeholder is a number that nobody guesses, like those of `services/gateway/text/control_tokens.py`. In the rendered
text the token ids of the table's rows take its place. The text before and behind it is tokenized on its own, as it is
around a special token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.common.errors import InvalidRequest
from services.gateway.text.control_tokens import new_nonce
from services.pb import gateway_pb2

FIELD = "messages"
MAX_PLACES = 64  # of vectors in one chat


@dataclass(frozen=True, slots=True)
class ChatVectors:
    """Rows of the table that stand in one place of a chat."""

    placeholder: str
    num_rows: int


def content_of(message: gateway_pb2.ChatMessage, vectors: list[ChatVectors]) -> str:
    """The content with placeholders, which are appended to `vectors`. Raises `InvalidRequest` for a wrong position."""
    content, pieces, end = message.content, [], 0
    for each in message.vectors:
        if len(vectors) == MAX_PLACES:
            raise InvalidRequest(f"the messages have vectors in more than {MAX_PLACES} places, the limit", FIELD)
        if not end <= each.position <= len(content):
            raise InvalidRequest(
                f"vectors stand at {each.position}, must be from {end} to {len(content)}, the content's characters",
                FIELD,
            )
        vectors.append(ChatVectors(new_nonce(), each.num_tokens))
        pieces += [content[end : each.position], vectors[-1].placeholder]
        end = each.position
    return "".join([*pieces, content[end:]])


def encode_around(
    vectors: Sequence[ChatVectors], text: str, first_table_id: int, encode: Callable[[str], list[int]]
) -> list[int]:
    """Token ids of a rendered text: `encode` of what is not a placeholder, and the ids of rows, from `first_table_id`.

    Raises `InvalidRequest` if the template has not written each placeholder once, in the order of the messages.
    """
    token_ids: list[int] = []
    for each in vectors:
        before, found, text = text.partition(each.placeholder)
        if not found or each.placeholder in text:
            raise InvalidRequest("the chat template leaves out, repeats or moves a part of a message of vectors", FIELD)
        if before:
            token_ids += encode(before)
        token_ids += range(first_table_id, first_table_id + each.num_rows)
        first_table_id += each.num_rows
    return token_ids + (encode(text) if text else [])
