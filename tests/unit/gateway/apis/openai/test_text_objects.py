"""`TextObjects` gives events with the JSON that Python's own encoder gives of the whole object."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.apis.openai.format import PLACEHOLDER, TextObjects

TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.just(PLACEHOLDER) | st.just('"\\\n</script>')


@given(st.lists(st.tuples(st.integers(0, 3), TEXTS), max_size=8), TEXTS)
def test_each_object_has_its_own_index_and_text(wanted: list[tuple[int, str]], model: str) -> None:
    def make(index: int, text: str) -> dict[str, Any]:
        return {"model": model, "choices": [{"index": index, "delta": {"content": text}, "end": None}]}

    objects = TextObjects(make)
    for index, text in wanted:
        whole = json.dumps(make(index, text), ensure_ascii=False, separators=(",", ":"))
        assert objects.event(index, text).decode() == f"data: {_as_sent(whole)}\n\n"
        before, after = (part.decode() for part in objects.first_frame())
        encoded = json.dumps(text, ensure_ascii=False)
        assert objects.event(0, text).decode() == before + _as_sent(encoded) + after


def _as_sent(text: str) -> str:
    """Python escapes DEL, which JSON does not demand, and not what ends a line for some readers; all else is the same.
    """
    text = text.replace("\\u007f", "\x7f").replace("\x85", "\\u0085")
    return text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
