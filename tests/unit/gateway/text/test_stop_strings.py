"""Stop strings found in chunks of text, compared with a search in the whole text."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import InvalidRequest
from services.gateway.text.stop_strings import StopStrings

LETTERS = st.text("ab", max_size=30)  # only two letters, so that stop strings and their prefixes are frequent


def cut(text: str, borders: list[int]) -> list[str]:
    """Cuts `text` into chunks; some may be empty."""
    ends = sorted(min(border, len(text)) for border in borders)
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def search_whole_text(text: str, stop: list[str], include_in_output: bool) -> tuple[str, str | None]:
    """Cuts `text` at the stop string that ends first. If several end there, the longest one counts."""
    matches = [
        (end, -len(string), string)
        for string in stop
        for end in range(len(string), len(text) + 1)
        if text[end - len(string) : end] == string
    ]
    if not matches:
        return text, None
    end, _, string = min(matches)
    return text[: end if include_in_output else end - len(string)], string


@settings(deadline=None)
@given(
    text=LETTERS,
    stop=st.lists(st.text("ab", min_size=1, max_size=6), max_size=4),
    borders=st.lists(st.integers(0, 30), max_size=12),
    include_in_output=st.booleans(),
)
def test_any_chunks_give_the_result_of_a_search_in_the_whole_text(
    text: str, stop: list[str], borders: list[int], include_in_output: bool
) -> None:
    strings = StopStrings(stop, include_in_output)
    shown, matched = "", None
    for chunk in cut(text, borders):
        piece, matched = strings.feed(chunk)
        shown += piece
    shown += strings.flush()
    assert (shown, matched) == search_whole_text(text, stop, include_in_output)


@settings(deadline=None)
@given(text=LETTERS, stop=st.lists(st.text("ab", min_size=1, max_size=6), max_size=4))
def test_only_what_could_become_a_stop_string_is_held_back(text: str, stop: list[str]) -> None:
    strings = StopStrings(stop)
    shown = ""
    for index, character in enumerate(text):
        piece, matched = strings.feed(character)
        shown += piece
        if matched is not None:
            return
        seen = text[: index + 1]
        prefixes = {string[:length] for string in stop for length in range(len(string))}
        held = max((prefix for prefix in prefixes if seen.endswith(prefix)), key=len, default="")
        assert shown + held == seen


def test_a_stop_string_over_three_chunks_is_removed() -> None:
    strings = StopStrings(["\n\nUser:"])
    assert strings.feed("Fine.\n") == ("Fine.", None)
    assert strings.feed("\nUs") == ("", None)
    assert strings.feed("er: and") == ("", "\n\nUser:")
    assert strings.flush() == ""


def test_held_back_text_is_shown_when_it_is_no_stop_string() -> None:
    strings = StopStrings(["STOP"])
    assert strings.feed("a STO") == ("a ", None)
    assert strings.feed("RM ST") == ("STORM ", None)
    assert strings.flush() == "ST"


def test_text_after_a_stop_string_is_dropped() -> None:
    strings = StopStrings(["。"], include_in_output=True)
    assert strings.feed("你好。再见") == ("你好。", "。")
    assert strings.feed("more") == ("", "。")
    assert strings.flush() == ""


def test_the_longest_of_the_stop_strings_that_end_together_counts() -> None:
    assert StopStrings(["User:", "\nUser:"]).feed("Hi\nUser:") == ("Hi", "\nUser:")


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least 1 character"):
        StopStrings(["a", ""])


def test_all_answers_with_the_same_stop_strings_share_what_is_made_of_them() -> None:
    stop = [f"{i:02}" + chr(ord("a") + i) * 254 for i in range(16)]
    tracemalloc.start()
    try:
        answers = [StopStrings(stop) for _ in range(200)]
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 2**20, f"{size >> 10} KiB"
    assert [each.feed(f"x{stop[3]}y") for each in answers] == [("x", stop[3])] * 200


def test_many_long_stop_strings_take_little_memory() -> None:
    """Hundreds of open requests may each have as many as they may be."""
    stop = [chr(97 + i) * 249 + str(i) for i in range(16)]
    tracemalloc.start()
    try:
        streams = [StopStrings([*stop, f"{request}"]) for request in range(100)]
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes < 100 * 8 * sum(map(len, stop))
    assert streams[0].feed("a" * 249)[0] == ""
