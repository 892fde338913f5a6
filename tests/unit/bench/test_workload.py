"""Lengths and arrivals, compared with the formulas of their distributions, and datasets from files written here."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from bench.load.workload import LengthDistribution, WorkloadError, arrival_times, dataset_prompts, random_prompts

MANY = 20_000
FIVE_SIGMA = 5.0


@pytest.mark.parametrize(
    ("mean", "ratio", "low", "high"), [(235, 0.5, 117, 353), (212, 0.5, 106, 318), (128, 0.0, 128, 128), (2, 0.9, 1, 4)]
)
def test_uniform_lengths_reach_both_bounds_evenly(mean: int, ratio: float, low: int, high: int) -> None:
    lengths = LengthDistribution("uniform", mean, ratio).sample(MANY, np.random.default_rng(0))
    assert set(lengths) == set(range(low, high + 1))
    if low > 1:  # if the lower bound is not raised to one token
        sigma = math.sqrt(((high - low + 1) ** 2 - 1) / 12 / MANY)  # of the mean of discrete uniform values
        assert abs(np.mean(lengths) - (low + high) / 2) <= FIVE_SIGMA * sigma


def test_normal_lengths_have_the_requested_mean_and_deviation() -> None:
    lengths = LengthDistribution("normal", 200, 0.1).sample(MANY, np.random.default_rng(0))
    assert abs(np.mean(lengths) - 200) <= FIVE_SIGMA * 20 / math.sqrt(MANY)
    assert abs(np.std(lengths) - 20) <= FIVE_SIGMA * 20 / math.sqrt(2 * MANY)
    within = np.mean(np.abs(np.array(lengths) - 200) <= 20.5)
    assert within == pytest.approx(math.erf(20.5 / 20 / math.sqrt(2)), abs=0.02)


def test_no_length_is_below_one() -> None:
    assert min(LengthDistribution("normal", 2, 0.9).sample(MANY, np.random.default_rng(0))) == 1
    assert LengthDistribution("constant", 9, 0.5).sample(3, np.random.default_rng(0)) == [9, 9, 9]


def test_random_prompts_have_their_lengths_and_use_the_whole_vocabulary() -> None:
    lengths = LengthDistribution("uniform", 40, 0.5)
    prompts = random_prompts(200, lengths, LengthDistribution("uniform", 12, 0.5), vocab_size=50, seed=3)
    assert all(len(prompt.token_ids or []) == prompt.num_tokens for prompt in prompts)
    assert all(20 <= prompt.num_tokens <= 60 and 6 <= prompt.max_tokens <= 18 for prompt in prompts)
    assert {token for prompt in prompts for token in prompt.token_ids or []} == set(range(50))


def test_the_seed_determines_the_workload() -> None:
    lengths = LengthDistribution("uniform", 40, 0.5)
    first, again, other = (random_prompts(20, lengths, lengths, 1000, seed) for seed in (1, 1, 2))
    assert first == again
    assert not {tuple(prompt.token_ids or []) for prompt in first} & {tuple(prompt.token_ids or []) for prompt in other}
    assert arrival_times(9, 2.0, "poisson", 1) == arrival_times(9, 2.0, "poisson", 1)
    assert arrival_times(9, 2.0, "poisson", 1) != arrival_times(9, 2.0, "poisson", 2)


def test_poisson_gaps_follow_their_distribution() -> None:
    """For the gaps of a Poisson process with the total T, P(gap <= x) = 1 - (1 - x/T)^(n-1)."""
    rate, total = 16.0, MANY / 16.0
    times = np.array(arrival_times(MANY, rate, "poisson", 5))
    assert times[-1] == pytest.approx(total)
    gaps = np.sort(np.diff(times, prepend=0.0))
    expected = 1 - (1 - gaps / total) ** (MANY - 1)
    distance = np.max(np.abs(expected - (np.arange(MANY) + 0.5) / MANY))
    assert distance < 1.95 / math.sqrt(MANY)  # Kolmogorov-Smirnov: exceeded with probability 1e-3


def test_the_variance_of_poisson_counts_is_their_mean() -> None:
    counts = np.histogram(arrival_times(MANY, 10.0, "poisson", 6), bins=1000)[0]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=FIVE_SIGMA * math.sqrt(2 / 1000))


def test_gaps_do_not_depend_on_the_previous_gap() -> None:
    gaps = np.diff(arrival_times(MANY, 10.0, "poisson", 7))
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < FIVE_SIGMA / math.sqrt(MANY)


def test_arrivals_can_be_constant_or_all_at_once() -> None:
    assert arrival_times(4, 2.0, "constant", 0) == [0.0, 0.5, 1.0, 1.5]
    assert arrival_times(3, math.inf, "poisson", 0) == [0.0, 0.0, 0.0]


def encode(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def words(count: int) -> str:
    return " ".join(["w"] * count)


def write_dataset(file: Path, lengths: list[tuple[int, ...]]) -> Path:
    conversations = [
        {"id": str(lengths), "conversations": [{"from": "human", "value": words(length)} for length in turns]}
        for turns in lengths
    ]
    file.write_text(json.dumps(conversations))
    return file


def test_a_dataset_prompt_is_the_first_message_with_the_length_of_the_second(tmp_path: Path) -> None:
    file = write_dataset(tmp_path / "data.json", [(10, 20), (30, 40, 50), (60, 70)])
    prompts = dataset_prompts(file, 3, encode, seed=0)
    assert sorted((prompt.num_tokens, prompt.max_tokens) for prompt in prompts) == [(10, 20), (30, 40), (60, 70)]
    assert all(prompt.text == words(prompt.num_tokens) and prompt.token_ids is None for prompt in prompts)
    assert [prompt.max_tokens for prompt in dataset_prompts(file, 3, encode, 0, output_len=9)] == [9, 9, 9]


def test_the_seed_determines_the_order_of_a_dataset(tmp_path: Path) -> None:
    file = write_dataset(tmp_path / "data.json", [(length, 9) for length in range(4, 40)])
    orders = [[prompt.num_tokens for prompt in dataset_prompts(file, 12, encode, seed)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert len(set(orders[2])) == 12


def test_conversations_that_are_too_short_or_too_long_are_skipped(tmp_path: Path) -> None:
    lengths = [(3, 9), (9, 3), (1025, 9), (1024, 1025), (9,), (), (1024, 1024), (4, 4)]
    file = write_dataset(tmp_path / "data.json", lengths)
    prompts = dataset_prompts(file, 2, encode, seed=0)
    assert sorted((prompt.num_tokens, prompt.max_tokens) for prompt in prompts) == [(4, 4), (1024, 1024)]
    with pytest.raises(WorkloadError, match="has 2 usable conversations, 3 were asked for"):
        dataset_prompts(file, 3, encode, seed=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ('[{"text": "hi"}]', "not in ShareGPT's schema"),
        ("[3]", "not in ShareGPT's schema"),
        ("3", "not in ShareGPT's schema"),
    ],
)
def test_the_error_names_an_unusable_dataset(content: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "data.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(WorkloadError, match=message):
        dataset_prompts(file, 1, encode, seed=0)
