"""`MarkedParser`: the common part of the parsers, a loop over what has arrived and not been understood yet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from services.gateway.text.deltas import Delta
from services.gateway.text.tools.call_writer import CallWriter, new_call_id
from services.gateway.text.tools.json_call import JsonArguments, JsonCall, MalformedCall


class MarkedParser(ABC):
    """A parser of calls. A format is a subclass with `_step`.

    A call that goes wrong before its name and the beginning of its arguments are known becomes content. One that goes
    wrong later, when deltas of it were sent, ends with its whole text in `CallEnd.malformed`, and what follows is
    content. Where a limit cuts the answer off, a call whose name is known ends with the arguments that have come.
    """

    end_marker: ClassVar[str] = ""  # stands after calls. At the end of an answer it may be missing, or unfinished

    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        self._writer = CallWriter(new_id)
        self._text = ""  # arrived and not taken yet
        self._raw: list[str] = []  # the text of the block of calls that is open, from its marker on
        self._call: JsonCall | JsonArguments | None = None  # the open one, in formats whose calls are JSON
        self._has_begun = False  # whether deltas of the open call have been written
        self._is_line_blank = True  # whether what `_show` has shown is only white space since the last line break

    def feed(self, text: str) -> list[Delta]:
        self._text += text
        self._run()
        return self._writer.take()

    def finish(self, is_cut: bool = False) -> list[Delta]:
        self._run()
        if self._raw:
            self._end_unfinished(is_cut)
        if self._writer.follows_call and self.end_marker.startswith(self._text.strip()):
            self._text = ""
        self._writer.content(self._text)
        self._text = ""
        self._writer.finish()
        return self._writer.take()

    @abstractmethod
    def _step(self) -> bool:
        """Takes the next part of `_text`. Returns whether to call it again. Raises `MalformedCall`."""

    @abstractmethod
    def _reset(self) -> None:
        """Goes back to looking for a call."""

    def _write_rest(self) -> bool:
        """Writes what is known of the open call, whose end is missing. Returns whether it has begun.

        `_text` is what was not taken. Raises `MalformedCall`.
        """
        if self._call is None:
            return False
        try:
            self._call.cut()
        finally:
            self._has_begun = self._call.has_begun
        return self._has_begun

    def _end_unfinished(self, is_cut: bool) -> None:
        """Ends the block that is open where the answer ends."""
        try:
            is_call = is_cut and self._write_rest()
        except MalformedCall:
            is_call = False
        self._take(len(self._text))
        if is_call:
            self._writer.end(is_cut=True)
            self._raw = []
        else:
            self._give_up()

    def _show(self, num_characters: int) -> None:
        """Removes the beginning of `_text`, which is content."""
        text, self._text = self._text[:num_characters], self._text[num_characters:]
        self._writer.content(text)
        *lines, last = text.split("\n")
        self._is_line_blank = (self._is_line_blank or bool(lines)) and not last.strip()

    def _take(self, num_characters: int) -> str:
        """Removes the beginning of `_text`, as a part of the open block."""
        taken, self._text = self._text[:num_characters], self._text[num_characters:]
        self._raw.append(taken)
        return taken

    def _skip_space(self) -> bool:
        """Removes white space at the beginning of `_text`. Returns whether anything is left."""
        num_spaces = len(self._text) - len(self._text.lstrip())
        self._skip(num_spaces)
        return bool(self._text)

    def _skip(self, num_characters: int) -> None:
        """Like `_take`, but between two calls of a block it only removes: no call can need the text any more."""
        if self._raw:
            self._take(num_characters)
        else:
            self._text = self._text[num_characters:]

    def _feed_call(self) -> bool:
        """Gives `_text` to `_call`, and ends it if it is complete. Returns whether it is. Raises `MalformedCall`."""
        call = self._call
        assert call is not None, "it has begun"
        try:
            index = call.feed(self._text)
        except MalformedCall as error:
            self._take(error.index)
            raise
        finally:
            self._has_begun = call.has_begun
        self._take(index)
        if call.is_complete:
            self._end_call()
        return call.is_complete

    def _end_call(self) -> None:
        """The open call is complete. What follows in its block is a new call or content."""
        self._writer.end()
        self._raw, self._call, self._has_begun = [], None, False

    def _run(self) -> None:
        while True:
            try:
                if not self._step():
                    return
            except MalformedCall:
                self._give_up()

    def _give_up(self) -> None:
        raw = "".join(self._raw)
        if self._has_begun:
            self._writer.end(malformed=raw)
        else:
            self._writer.content(raw)
        self._raw, self._call, self._has_begun = [], None, False
        self._reset()
