"""`bench/lane_turns.py`: two lanes on two GPUs against the bounds of their kernels' times."""

from __future__ import annotations

import pytest

from bench.lane_turns import (
    ATTENTION_GPU,
    DECODE_FIRST,
    DECODE_LAST,
    DECODES,
    DENSE,
    DENSE_GPU,
    DENSE_OF_DECODES,
    HANDOFF_US,
    NUM_LAYERS,
    main,
    overlap,
)

STEPS = [(DENSE, DECODE_FIRST), (DENSE, DECODE_LAST), (DENSE_OF_DECODES, DECODES)]
PRIORS = [(), (ATTENTION_GPU,), (DENSE_GPU,), (DENSE_GPU, ATTENTION_GPU)]


def bounds_ms(dense: tuple[int, ...], attention: tuple[int, ...]) -> tuple[float, float]:
    """For a step of each lane: if the longer strokes of both follow each other at once, and if all strokes do."""
    longer, both = max(sum(dense), sum(attention)), sum(dense) + sum(attention)
    return 2 * NUM_LAYERS * longer / 1e3, 2 * NUM_LAYERS * (both + 2 * HANDOFF_US) / 1e3


@pytest.mark.parametrize(("dense", "attention"), STEPS)
def test_one_lane_takes_the_sum_of_its_kernels(dense: tuple[int, ...], attention: tuple[int, ...]) -> None:
    alone_ms = bounds_ms(dense, attention)[1] / 2
    assert overlap(dense, attention, num_lanes=1).step_ms == pytest.approx(alone_ms, rel=0.01)


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize(("dense", "attention"), STEPS)
def test_two_lanes_take_as_long_as_the_longer_strokes_or_more(
    dense: tuple[int, ...], attention: tuple[int, ...], prior: tuple[int, ...]
) -> None:
    shortest, longest = bounds_ms(dense, attention)
    found = overlap(dense, attention, prior)
    assert shortest * 0.98 < found.step_ms < longest * 1.02
    assert found.busy[DENSE_GPU] == pytest.approx(2 * NUM_LAYERS * sum(dense) / 1e3 / found.step_ms, rel=0.02)


def test_short_kernels_behind_the_longest_one_make_lanes_go_from_gpu_to_gpu_together() -> None:
    assert overlap(DENSE, DECODE_FIRST).step_ms > bounds_ms(DENSE, DECODE_FIRST)[1] * 0.9


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("dense", "attention"), STEPS[1:])
def test_with_the_longest_kernel_last_the_longer_strokes_follow_each_other_at_once(
    dense: tuple[int, ...], attention: tuple[int, ...], seed: int
) -> None:
    assert overlap(dense, attention, seed=seed).step_ms == pytest.approx(bounds_ms(dense, attention)[0], rel=0.03)


def test_priority_on_the_dense_gpu_is_worse_where_its_strokes_are_longer() -> None:
    best = overlap(DENSE, DECODE_FIRST, (ATTENTION_GPU,)).step_ms
    assert overlap(DENSE, DECODE_FIRST, (DENSE_GPU, ATTENTION_GPU)).step_ms > best * 1.2


def test_it_prints_all_kinds_of_steps(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    assert capsys.readouterr().out.count("two lanes, priority on the attention worker's GPU") == len(STEPS)
