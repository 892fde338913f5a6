"""JSON encoded in pieces equals JSON encoded at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json, to_json

from services.gateway.http.json_pieces import json_pieces

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.fixed_dictionaries({"a": st.lists(inner)}),
)


@given(VALUES | st.fixed_dictionaries({"id": st.text(), "choices": st.lists(VALUES), "usage": VALUES}))
def test_the_pieces_together_are_the_whole_json(value: Any) -> None:
    joined = b"".join(json_pieces(value))
    assert from_json(joined) == from_json(to_json(value))
    assert len(joined.decode().splitlines()) == 1, "for no reader of lines it has several"


@pytest.mark.parametrize("num_answers", [1, 20])
def test_no_piece_is_large(num_answers: int) -> None:
    entry = {str(i): {"logprob": -1.0, "rank": i, "decoded_token": "a"} for i in range(21)}
    choice = {"index": 0, "text": "", "prompt_logprobs": [None, *[entry] * 1000], "token_ids": list(range(5000))}
    whole = {"choices": [choice] * num_answers}
    pieces = list(json_pieces(whole))
    assert b"".join(pieces) == to_json(whole)
    assert max(map(len, pieces)) < 300_000


def test_many_small_values_are_few_pieces() -> None:
    """Each costs as much as a hundred values."""
    of_position = {str(i): {"logprob": -1.0, "rank": i, "decoded_token": "a"} for i in range(10_000)}
    pieces = list(json_pieces({"choices": [{"index": 0, "prompt_logprobs": [None, of_position, of_position]}]}))
    assert len(pieces) < 4 * 20_000 / 512
    assert max(map(len, pieces)) < 100_000
