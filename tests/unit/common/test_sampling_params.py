"""Which sampling options are refused, and the error messages."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest

from services.common.errors import InvalidRequest
from services.common.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("option", "value", "limit"),
    [
        ("temperature", -0.1, "from 0 to 100"),
        ("temperature", 100.5, "from 0 to 100"),
        ("top_k", 0, "at least 1"),
        ("top_k", -1, "at least 1"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.0000001, "above 0 and at most 1"),
        ("min_p", -0.01, "from 0 to 1"),
        ("min_p", 1.01, "from 0 to 1"),
        ("repetition_penalty", 0.0, "above 0 and at most 100"),
        ("presence_penalty", 2.5, "from -2 to 2"),
        ("presence_penalty", -2.5, "from -2 to 2"),
        ("frequency_penalty", 2.5, "from -2 to 2"),
        ("frequency_penalty", -2.5, "from -2 to 2"),
        ("min_tokens", -1, "at least 0"),
        ("seed", -1, "from 0 to 18446744073709551615"),
        ("seed", 2**64, "from 0 to 18446744073709551615"),
    ],
)
def test_option_out_of_range_is_refused_with_value_and_limit(option: str, value: float, limit: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        SamplingParams(**{option: value}).validate()
    assert str(refusal.value).startswith(f"{option} is {value}, must be ")
    assert limit in str(refusal.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "option",
    ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"],
)
def test_option_that_is_not_finite_is_refused(option: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=rf"{option} is {value}, must be a finite number"):
        SamplingParams(**{option: value}).validate()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.0},
        {
            "temperature": 100.0,
            "top_k": 1,
            "top_p": 1.0,
            "min_p": 1.0,
            "min_tokens": 10**9,
            "seed": 2**64 - 1,
        },
        {
            "logit_bias": tuple((token_id, 100.0 - token_id % 201) for token_id in range(1024)),
            "bad_words": ((1,), tuple(range(64))) * 64,
            "allowed_token_ids": tuple(range(1024)),
        },
        {"top_p": 1e-9, "repetition_penalty": 1e-3, "presence_penalty": -2.0, "frequency_penalty": 2.0},
    ],
)
def test_options_within_their_ranges_are_accepted(options: dict[str, Any]) -> None:
    SamplingParams(**options).validate()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": tuple((i, 0.5) for i in range(1025))}, "logit_bias has 1025 tokens, must have 0 to 1024"),
        ({"logit_bias": ((7, 100.5),)}, r"logit_bias\[7\] is 100.5, must be from -100 to 100"),
        ({"logit_bias": ((7, math.nan),)}, r"logit_bias\[7\] is nan, must be a finite number"),
        ({"bad_words": ((1,),) * 129}, "bad_words has 129 words, must have 0 to 128"),
        ({"bad_words": ((1,), ())}, r"bad_words\[1\] has 0 tokens, must have 1 to 64"),
        ({"bad_words": ((1,) * 65,)}, r"bad_words\[0\] has 65 tokens, must have 1 to 64"),
        ({"allowed_token_ids": tuple(range(1025))}, "allowed_token_ids has 1025 tokens, must have 0 to 1024"),
    ],
)
def test_lists_beyond_a_limit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**options).validate()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": ((3, 1.0), (10, 1.0))}, r"logit_bias has the out-of-vocabulary token 10: must be in \[0, 10\)"),
        ({"bad_words": ((3,), (4, 10))}, r"bad_words\[1\] has the out-of-vocabulary token 10: must be in \[0, 10\)"),
        ({"allowed_token_ids": (3, 10)}, r"allowed_token_ids has the out-of-vocabulary token 10: must be in \[0, 10\)"),
    ],
)
def test_token_beyond_the_vocabulary_is_refused(options: dict[str, Any], message: str) -> None:
    SamplingParams(**options).validate_token_ids(11)
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**options).validate_token_ids(10)


@pytest.mark.parametrize(
    ("options", "stop_token_ids", "is_refused"),
    [
        ({"allowed_token_ids": (4, 5)}, (4, 5), False),  # the first token ends the answer
        ({"allowed_token_ids": (4, 5), "min_tokens": 2}, (4, 5), True),
        ({"allowed_token_ids": (4, 5), "min_tokens": 2}, (4,), False),
        ({"allowed_token_ids": (4, 5), "bad_words": ((4,), (5, 5))}, (), False),
        ({"allowed_token_ids": (4, 5), "bad_words": ((4,), (5,))}, (), True),
        ({"allowed_token_ids": (4, 5), "bad_words": ((5,),), "min_tokens": 1}, (4,), True),
        ({"bad_words": ((4,),), "min_tokens": 1}, (5,), False),  # all others are allowed
    ],
)
def test_options_that_forbid_every_token_from_the_start_are_refused(
    options: dict[str, Any], stop_token_ids: tuple[int, ...], is_refused: bool
) -> None:
    refusal = pytest.raises(InvalidRequest, match="exclude all") if is_refused else contextlib.nullcontext()
    with refusal:
        SamplingParams(**options).check_choice(stop_token_ids)
