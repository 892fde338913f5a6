"""Log-probabilities in arrays are those of the messages, and take little memory."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from services.common.token_logprobs import LogprobRows, TokenLogprobs, decode_logprobs, encode_rows
from services.pb import sampling_pb2


def message(index: int, num_top: int) -> sampling_pb2.TokenLogprobs:
    ids = range(index, index + num_top)
    logprobs = [-0.25 * i for i in range(num_top)]
    return sampling_pb2.TokenLogprobs(
        logprob=-0.5 * index, top_token_ids=ids, top_logprobs=logprobs, rank=index or None
    )


MESSAGES = [message(i, num_top) for i, num_top in enumerate([3, 0, 5, 1])]


def rows_of(messages: list[sampling_pb2.TokenLogprobs]) -> LogprobRows:
    rows = LogprobRows()
    for each in messages:
        rows.append(each)
    return rows


def test_elements_are_those_of_the_messages() -> None:
    rows, expected = rows_of(MESSAGES), [decode_logprobs(each) for each in MESSAGES]
    assert list(rows) == expected and len(rows) == 4 and rows.num_values == 4 + 9
    assert [rows[i] for i in range(-4, 4)] == expected * 2
    assert list(rows.encoded()) == MESSAGES
    assert expected[0].rank is None
    for start in range(5):
        for stop in range(start, 5):
            assert list(rows[start:stop]) == expected[start:stop]
    with pytest.raises(IndexError):
        rows[4]


@pytest.mark.parametrize("cut", range(5))
def test_parts_together_are_the_whole(cut: int) -> None:
    rows = rows_of(MESSAGES)
    joined = rows[:cut]
    joined.extend(rows[cut:])
    assert list(joined) == list(rows)


def test_a_value_takes_about_ten_bytes() -> None:
    rows = rows_of([message(1, 20)] * 5000)
    num_bytes = sum(sys.getsizeof(getattr(rows, name)) for name in LogprobRows.__slots__)
    assert num_bytes / rows.num_values < 12  # as docs/operations.md says


def test_values_are_32_bit_floats() -> None:
    [row] = rows_of([sampling_pb2.TokenLogprobs(logprob=-0.1)])
    assert row == TokenLogprobs(float(np.float32(-0.1)), (), None)


@pytest.mark.parametrize("num_top", [0, 3])
@pytest.mark.parametrize("num_known", [0, 2, 5])
def test_encoded_rows_are_those_of_the_messages(num_top: int, num_known: int) -> None:
    """Also behind other rows, which may have another number of likely tokens."""
    messages = [message(i, num_top) for i in range(5)]
    encoded = encode_rows([decode_logprobs(each) for each in messages])
    rows = rows_of(MESSAGES)
    rows.extend_encoded(encoded, 5, num_known)
    assert list(rows) == list(rows_of([*MESSAGES, *messages[num_known:]]))
    assert encode_rows([]) == b""


def test_rows_of_values_in_common_are_made_once() -> None:
    values = [decode_logprobs(message(i, 3)) for i in range(6)]
    made = dict[int, bytes]()
    assert encode_rows(values[:4], made) == encode_rows(values[:4])
    assert encode_rows([*values[:3], *values[4:]], made) == encode_rows([*values[:3], *values[4:]])
    assert len(made) == 6
