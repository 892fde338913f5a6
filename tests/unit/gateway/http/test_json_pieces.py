"""JSON encoded in pieces equals JSON encoded at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json, to_json

from services.gateway.http.json_pieces import MAX_MEMBERS, LazyObject, json_line, json_pieces

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


@pytest.mark.parametrize("num_members", [0, 1, MAX_MEMBERS, MAX_MEMBERS + 1, 1000])
def test_the_members_of_a_lazy_object_are_made_some_at_a_time(num_members: int) -> None:
    made, expected = 0, {str(i): {"rank": i, "decoded_token": "a\u2028"} for i in range(num_members)}

    def members() -> Iterator[tuple[str, Any]]:
        nonlocal made
        for pair in expected.items():
            made += 1
            yield pair

    joined, known = b"", 0
    for piece in json_pieces({"a": [None, 1, LazyObject(members()), {}], "b": 2}):
        assert made - known <= MAX_MEMBERS
        joined, known = joined + piece, made
    assert from_json(joined) == {"a": [None, 1, expected, {}], "b": 2}
    assert from_json(json_line([LazyObject(members())])) == [expected]
