"""Pictures within the messages of a chat: as parts for the template, and as text for the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class PictureText(NamedTuple):
    """What stands for a picture. Of a chat only the template can write either: messages have it as plain text."""

    marker: str  # in a rendered chat, and in prompts
    text: str  # what is tokenized instead; it has the picture's token once
    chat_template: str = ""  # of a model whose files have none; empty: there is none
    precedes_text: bool = False  # of a prompt of text, with the tokens that begin it

    def written(self, text: str) -> str:
        """A rendered text with what is tokenized for its pictures."""
        return text if self.marker == self.text else text.replace(self.marker, self.text)


def parts_of(content: str, positions: Sequence[int]) -> list[dict[str, Any]]:
    """A content as parts: pictures stand before the characters at `positions`, which ascend."""
    parts: list[dict[str, Any]] = []
    end = 0
    for position in positions:
        if position > end:
            parts.append({"type": "text", "text": content[end:position]})
        parts.append({"type": "image"})
        end = position
    if end < len(content) or not parts:
        parts.append({"type": "text", "text": content[end:]})
    return parts
