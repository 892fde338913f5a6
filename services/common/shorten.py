"""Shortens a client's text before an error quotes it, so that no error message has megabytes."""

from __future__ import annotations

import json
import reprlib

MAX_QUOTED_CHARACTERS = 100
MAX_TEXT_CHARACTERS = 1000
MARK = "…"


def shorten(text: str, most: int = MAX_TEXT_CHARACTERS) -> str:
    """The text, cut to at most `most` characters; a cut text ends with `MARK`."""
    return text if len(text) <= most else text[: most - 1] + MARK


def one_line(error: BaseException) -> str:
    """The message of a library's error, which may have several paragraphs, in one line."""
    return shorten(" ".join(str(error).split()))


def quote(text: str) -> str:
    """The first `MAX_QUOTED_CHARACTERS` in quotation marks, with unprintable characters escaped."""
    return repr(shorten(text, MAX_QUOTED_CHARACTERS))


class JsonWords(reprlib.Repr):
    """Writes lists, objects, true, false and null as JSON, as their sender did, and a text alone as `quote` does."""

    def repr_str(self, value: str, level: int) -> str:
        if level == self.maxlevel:
            return super().repr_str(value, level)
        if len(value) > self.maxstring:
            half = (self.maxstring - len(self.fillvalue)) // 2
            value = value[:half] + self.fillvalue + value[-half:]
        return json.dumps(value, ensure_ascii=not value.isprintable())

    def repr_bool(self, value: bool, level: int) -> str:
        return "true" if value else "false"

    def repr_NoneType(self, value: None, level: int) -> str:  # `reprlib` finds it by the type's name
        return "null"


def show(value: object) -> str:
    """A value of JSON, cut to `MAX_QUOTED_CHARACTERS`; its time is bounded, however many values are nested in it."""
    words = JsonWords()
    words.maxlevel = 3
    words.maxlist = words.maxdict = words.maxtuple = 20
    words.maxstring = words.maxother = words.maxlong = MAX_QUOTED_CHARACTERS
    return shorten(words.repr(value), MAX_QUOTED_CHARACTERS)
