"""`CallWriter`: collects the deltas that a parser of calls finds, numbers the calls and gives them ids."""

from __future__ import annotations

from collections.abc import Callable

from services.gateway.resources.repeatable import draw_hex
from services.gateway.text.deltas import CallArguments, CallBegin, CallEnd, ContentDelta, Delta


def new_call_id() -> str:
    """An id like OpenAI's."""
    return f"call_{draw_hex(12)}"


class CallWriter:
    """The deltas since the last `take`. White space before a call is dropped, as is white space after the last one."""

    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        self._new_id = new_id
        self._deltas: list[Delta] = []
        self._space = ""  # white space at the end of the content so far, which is not written yet
        self._num_calls = 0
        self.follows_call = False  # whether only white space has come since the last call
        self._space_before_call = ""

    def content(self, text: str) -> None:
        """Adds text for the user."""
        whole = self._space + text
        shown = whole.rstrip()
        self._space = whole[len(shown) :]
        if shown:
            self.follows_call = False
            self._deltas.append(ContentDelta(shown))

    def begin(self, name: str) -> None:
        """Begins a call."""
        self._space_before_call, self._space = self._space, ""
        self._deltas.append(CallBegin(self._num_calls, self._new_id(), name))

    def arguments(self, text: str) -> None:
        """Adds a piece of the call's arguments."""
        if text:
            self._deltas.append(CallArguments(self._num_calls, text))

    def end(self, malformed: str | None = None, *, is_cut: bool = False) -> None:
        """Ends the call. `malformed`: the text of a call that went wrong after it began. `is_cut`: it is unfinished."""
        text = None if malformed is None else self._space_before_call + malformed
        self._deltas.append(CallEnd(self._num_calls, text, is_cut))
        self._num_calls += 1
        self.follows_call = True

    def finish(self) -> None:
        """Writes the white space at the end, unless it follows a call."""
        if self._space and not self.follows_call:
            self._deltas.append(ContentDelta(self._space))
        self._space = ""

    def take(self) -> list[Delta]:
        """The deltas, neighbours of one kind joined."""
        deltas, self._deltas = self._deltas, []
        joined: list[Delta] = []
        for delta in deltas:
            last = joined[-1] if joined else None
            if isinstance(delta, ContentDelta) and isinstance(last, ContentDelta):
                joined[-1] = ContentDelta(last.text + delta.text)
            elif isinstance(delta, CallArguments) and isinstance(last, CallArguments):
                joined[-1] = CallArguments(last.index, last.text + delta.text)
            else:
                joined.append(delta)
        return joined
