"""`bench/ratio.py`: its load against a simulated server, its closed form against all numbers, its choices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.ratio import (
    ONE_GPU,
    RANKS,
    REPLICAS,
    SPLIT,
    Arrangement,
    Lengths,
    Run,
    Strokes,
    best_num_attention,
    checks,
    choose,
    main,
    read_strokes,
)

LINEAR = Strokes(
    num_layers=1,
    dense_rows=[0, 10_000],
    dense_ms=[4.0, 204.0],  # 4 + 0.02 for each row
    attention_tokens=[0, 10_000_000],
    attention_ms=[0.0, 1000.0],  # 0.0001 for each token
    prompt_attention_ms=0.0,
    seam_rows=[1],
    seam_ms=[0.0],
    far_seam_rows=[1],
    far_seam_ms=[0.0],
    sum_rows=[1],
    sum_us=[0.0],
    after_ms=0.0,
    after_row_ms=0.0,
    rank_efficiency=1.0,
    rank_after_layer_us=0.0,
    cache_tokens=1_000_000,
    cache_tokens_alone=1_000_000,
)


def test_the_context_of_a_row_is_that_of_a_simulated_server() -> None:
    generator = np.random.default_rng(0)
    prompts, outputs = generator.integers(10, 500, 3000), generator.integers(1, 400, 3000)
    contexts = [prompt + step for prompt, output in zip(prompts, outputs, strict=True) for step in range(1, output + 1)]
    assert Lengths(prompts, outputs).context == pytest.approx(float(np.mean(contexts)), rel=1e-9)


@pytest.mark.parametrize(("rows", "context"), [(8, 500), (64, 1000), (64, 4000), (256, 200), (256, 2000)])
def test_the_closed_form_is_the_best_of_all_numbers(rows: int, context: int) -> None:
    """The strokes of two lanes, as in the derivation: the end of one lane is not waited for."""

    def speed_of_each_gpu(count: float) -> float:
        step_ms = max(2 * LINEAR.dense(rows * count / 2), 2 * LINEAR.attention(rows * context / 2))
        return rows * count / step_ms / (count + 1)

    best = best_num_attention(LINEAR, rows, context)
    counts = np.arange(0.1, 60, 0.01)
    assert best == pytest.approx(counts[np.argmax([speed_of_each_gpu(each) for each in counts])], abs=0.02)


def test_two_lanes_hide_the_shorter_stroke() -> None:
    one, two = Arrangement(SPLIT), Arrangement(SPLIT, num_lanes=2)
    assert one.step_ms(LINEAR, 100, 1000) == pytest.approx(6.0 + 10.0)
    assert two.step_ms(LINEAR, 100, 1000) == pytest.approx(2 * 5.0)  # the dense strokes of both halves: 4 + 0.02 * 50
    assert one.step_ms(LINEAR, 100, 40_000) == pytest.approx(6.0 + 400.0)
    assert two.step_ms(LINEAR, 100, 40_000) == pytest.approx(400.0)
    assert two.step_ms(LINEAR, 2, 100) == pytest.approx(2 * 4.02)  # weights are read for each half


def test_predicted_steps_are_close_to_all_measured_ones() -> None:
    found = checks(read_strokes())
    steps = [each for each in found if "a step of" in each.what]
    assert len(steps) == 13
    steps += [each for each in found if each.what.endswith("a step")]  # of servers
    assert len(steps) == 23
    assert max(abs(each.error) for each in steps) < 0.12
    assert np.mean([abs(each.error) for each in steps]) < 0.05


def test_predicted_throughputs_are_close_to_all_measured_ones() -> None:
    found = [each for each in checks(read_strokes()) if each.unit == "tok/s"]
    assert len(found) == 19
    assert max(abs(each.error) for each in found) < 0.12


def test_a_run_has_the_steps_that_can_be_counted() -> None:
    """Two requests at a time of four, and room for three rows in a step; each step takes 1 ms."""
    strokes = replace(LINEAR, dense_ms=[1.0, 1.0])
    strokes = replace(strokes, attention_ms=[0.0, 0.0])
    run = Run(num_requests=4, at_once=2, prompt=3, output=2, step_tokens=3)
    # Prompts: 3 of A; a token of A and 2 of B's prompt, with which A ends; 1 of B's and 2 of C's; and so on.
    steps = 0
    waiting, running = 4, list[list[int]]()  # tokens of its prompt that are left, tokens that it has written
    while waiting or running:
        while waiting and len(running) < 2:
            waiting, running = waiting - 1, [*running, [3, 0]]
        room = 3 - sum(not left for left, _ in running)
        for each in running:
            part = min(room, each[0])
            room -= part
            each[0] -= part
            each[1] += each[0] == 0
        running = [each for each in running if each[1] < 2]
        steps += 1
    assert run.tokens_per_s(strokes, Arrangement(ONE_GPU)) == pytest.approx(1000 * 4 * 2 / steps)
    captured = replace(run, capture_ms=10.0).tokens_per_s(strokes, Arrangement(ONE_GPU))
    assert captured < 1000 * 4 * 2 / (steps + 10)


def test_strokes_of_half_the_layers_take_half_the_time() -> None:
    strokes = read_strokes()
    whole, half = (Arrangement(ONE_GPU).step_ms(each, 64, 500) for each in (strokes, strokes.of_layers(16)))
    assert half - strokes.after(64) == pytest.approx((whole - strokes.after(64)) / 2)


def test_replicas_have_the_throughput_and_ranks_the_short_times() -> None:
    strokes, lengths = read_strokes(), Lengths.of(1024, 512)
    assert choose(strokes, lengths, 2, float("inf"), 2048)[0].arrangement.kind == REPLICAS
    assert choose(strokes, lengths, 2, 3.4, 2048)[0].arrangement.kind == RANKS
    assert choose(strokes, lengths, 2, 0.5, 2048) == []


def test_no_arrangement_runs_more_than_its_caches_hold() -> None:
    strokes, lengths = read_strokes(), Lengths.of(20_000, 10)
    for each in choose(strokes, lengths, 4, float("inf"), 2048):
        assert each.rows * lengths.context <= 4 * strokes.cache_tokens_alone


def test_a_bad_line_of_lengths_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("100,20\n100,x\n")
    assert main(["--gpus", "2", "--lengths", str(file)]) == 1
    assert "lengths.csv:2: '100,x' is not prompt,output" in capsys.readouterr().err


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    assert main(["--gpus", "4", "--plot", str(tmp_path / "ratio.png")]) == 0
    assert (tmp_path / "ratio.png").stat().st_size > 10_000
