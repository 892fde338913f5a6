"""`bench/lane_turns.py`: two lanes on two GPUs against the bounds of their kernels' times."""

from __future__ import annotations

import pytest

from bench.lane_turns import (
    ATTENTION_GPU,
    DECODE_FIRST,
    DECODE_ONLY,
    DENSE,
    DENSE_GPU,
    HANDOFF_US,
    NUM_LAYERS,
    main,
    overlap,
)


def bounds_ms(attention: tuple[int, ...]) -> tuple[float, float]:
    """For a step of each lane: if the longer strokes of both follow each other at once, and if all strokes do."""
    dense, other = sum(DENSE), sum(attention)
    return 2 * NUM_LAYERS * max(dense, other) / 1e3, 2 * NUM_LAYERS * (dense + other + 2 * HANDOFF_US) / 1e3


@pytest.mark.parametrize("attention", [DECODE_FIRST, DECODE_ONLY])
def test_one_lane_takes_the_sum_of_its_kernels(attention: tuple[int, ...]) -> None:
    assert overlap(DENSE, attention, num_lanes=1).step_ms == pytest.approx(bounds_ms(attention)[1] / 2, rel=0.01)


@pytest.mark.parametrize("attention", [DECODE_FIRST, DECODE_ONLY])
def test_lanes_of_equal_priority_go_from_gpu_to_gpu_together(attention: tuple[int, ...]) -> None:
    shortest, longest = bounds_ms(attention)
    found = overlap(DENSE, attention)
    assert longest * 0.9 < found.step_ms < longest
    assert found.busy[DENSE_GPU] == pytest.approx(shortest / found.step_ms, rel=0.02)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("attention", [DECODE_FIRST, DECODE_ONLY])
def test_with_priority_on_the_attention_gpu_the_dense_gpu_is_always_busy(attention: tuple[int, ...], seed: int) -> None:
    found = overlap(DENSE, attention, (ATTENTION_GPU,), seed=seed)
    assert found.step_ms == pytest.approx(bounds_ms(attention)[0], rel=0.02)
    assert found.busy[DENSE_GPU] > 0.98


def test_priority_on_the_dense_gpu_is_worse() -> None:
    best = overlap(DENSE, DECODE_FIRST, (ATTENTION_GPU,)).step_ms
    assert overlap(DENSE, DECODE_FIRST, (DENSE_GPU, ATTENTION_GPU)).step_ms > best * 1.2


def test_it_prints_both_kinds_of_steps(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    assert capsys.readouterr().out.count("two lanes, priority on the attention worker's GPU") == 2
