"""What a client sent, as far as it is shown in errors: a message of megabytes must not come back."""

from __future__ import annotations

MAX_QUOTED_CHARACTERS = 100
MAX_TEXT_CHARACTERS = 1000
MARK = "…"


def shorten(text: str, most: int = MAX_TEXT_CHARACTERS) -> str:
    """At most so many characters, the last of them a mark where some are missing."""
    return text if len(text) <= most else text[: most - 1] + MARK


def quote(text: str) -> str:
    """In quotation marks, with everything escaped that does not print; the first `MAX_QUOTED_CHARACTERS`."""
    return repr(shorten(text, MAX_QUOTED_CHARACTERS))
