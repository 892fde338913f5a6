"""`bench/lane_waves.py` against what two H200 gave, and against the bounds of its own strokes."""

from __future__ import annotations

import pytest

from bench.lane_waves import OUTPUT, PROMPT, STROKES, serve


@pytest.mark.parametrize(
    ("num_requests", "num_lanes", "step_tokens", "measured"),
    [
        (1024, 1, 2048, 27_960),
        (2048, 1, 2048, 28_824),
        (1024, 2, 2048, 39_787),
        (2048, 2, 2048, 41_096),
        (1024, 2, 1024, 38_794),
    ],
)
def test_bfloat16_is_what_two_gpus_gave(num_requests: int, num_lanes: int, step_tokens: int, measured: float) -> None:
    served = serve(STROKES["bfloat16"], num_requests, step_tokens, num_lanes)
    assert served.tokens_per_s == pytest.approx(measured, rel=0.06)


@pytest.mark.parametrize("takes_turns", [False, True])
@pytest.mark.parametrize("name", STROKES)
def test_no_dealing_is_faster_than_the_dense_stroke_of_all_rows(name: str, takes_turns: bool) -> None:
    num_requests, step_tokens = 512, 1024
    dense_ms, _ = STROKES[name].dense(step_tokens)
    served = serve(STROKES[name], num_requests, step_tokens, takes_turns=takes_turns)
    least_ms = num_requests * (PROMPT + OUTPUT) / step_tokens * dense_ms  # full steps need the least for a row
    assert num_requests * OUTPUT / served.tokens_per_s * 1000 > least_ms
    assert served.longest_ms > dense_ms / 4


def test_prompts_of_one_lane_at_a_time_are_slower() -> None:
    for strokes in STROKES.values():
        assert serve(strokes, 1024, 2048, takes_turns=True).tokens_per_s < serve(strokes, 1024, 2048).tokens_per_s


def test_the_time_to_the_first_token_is_counted_from_the_moment_when_a_request_comes() -> None:
    strokes = STROKES["FP8"]
    first, longer = serve(strokes, 1024, 1024), serve(strokes, 4096, 1024)
    assert longer.ttft_ms < first.ttft_ms, "only the first 1,024 come at once"
