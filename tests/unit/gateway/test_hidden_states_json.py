"""Hidden states in answers are JSON even where a value is no number."""

from __future__ import annotations

import json

import numpy as np

from services.gateway.apis.shared.json_pieces import json_at_once, json_pieces
from services.gateway.features.hidden_states import HiddenStatesList
from services.gateway.features.token_rows import TokenRows


def strict(encoded: bytes) -> object:
    """What a reader finds that takes RFC 8259 at its word."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(encoded, parse_constant=refuse)


def test_what_is_no_number_is_null() -> None:
    rows = np.array([[1.0, 2.0], [0.5, np.nan], [np.inf, -1.5]], "<f4")
    states = HiddenStatesList(TokenRows(3, rows.tobytes()), num_prompt_tokens=1)
    assert strict(json_at_once({"hidden_states": states.last})) == {"hidden_states": [None, -1.5]}
    assert strict(b"".join(json_pieces(states))) == [[[1.0, 2.0]], [0.5, None], [None, -1.5]]


def test_without_a_token_of_the_answer_there_is_no_last_row() -> None:
    rows = np.ones((2, 2), "<f4")
    assert HiddenStatesList(TokenRows(2, rows.tobytes()), num_prompt_tokens=2).last == []
