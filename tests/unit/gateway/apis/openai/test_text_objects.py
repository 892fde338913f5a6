"""`TextObjects` gives events with the JSON that Python's own encoder gives of the whole object."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import to_json

from services.gateway.apis.openai.format import PLACEHOLDER, TextObjects

TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.just(PLACEHOLDER) | st.just('"\\\n</script>')


@given(st.lists(st.tuples(st.integers(0, 3), TEXTS), max_size=8), TEXTS)
def test_each_object_has_its_own_index_and_text(wanted: list[tuple[int, str]], model: str) -> None:
    def make(index: int, text: str) -> dict[str, Any]:
        return {"model": model, "choices": [{"index": index, "delta": {"content": text}, "end": None}]}

    objects = TextObjects(make)
    for index, text in wanted:
        whole = json.dumps(make(index, text), ensure_ascii=False, separators=(",", ":"))
        assert objects.event(index, text).decode() == f"data: {_without_escapes(whole)}\n\n"
        before, after = objects.first_frame()
        assert objects.event(0, text) == before + to_json(text) + after


def _without_escapes(text: str) -> str:
    """Python escapes DEL, which JSON does not demand; all other escapes are the same."""
    return text.replace("\\u007f", "\x7f")
