"""Subtitles of transcriptions, by their formats' rules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from services.gateway.apis.audio import formats


def spoken(start: float, end: float, text: str) -> Any:
    return SimpleNamespace(segment=SimpleNamespace(start=start, end=end), text=text)


def test_a_text_that_looks_like_markup_or_an_arrow_stays_text() -> None:
    segments = [spoken(0.0, 1.5, " R&D <3 a --> b ")]
    assert formats.srt(segments).splitlines()[2] == "R&D <3 a -> b", "SubRip has no entities"
    vtt = formats.vtt(segments).splitlines()
    assert vtt[:3] == ["WEBVTT", "", "00:00:00.000 --> 00:00:01.500"]
    assert vtt[3] == "R&amp;D &lt;3 a -> b"
    assert (formats.srt([]), formats.vtt([])) == ("", "WEBVTT\n")


@pytest.mark.parametrize(
    ("seconds", "written"),
    [(0.0, "00:00:00,000"), (0.9995, "00:00:01,000"), (59.9996, "00:01:00,000"), (3661.2, "01:01:01,200")],
)
def test_times_are_rounded_to_milliseconds(seconds: float, written: str) -> None:
    [_, times, _] = formats.srt([spoken(0.0, seconds, "a")]).splitlines()
    assert times == f"00:00:00,000 --> {written}"
