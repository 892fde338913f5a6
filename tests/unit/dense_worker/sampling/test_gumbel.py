"""Drawing tokens: the distribution compared with softmax, the noise with a formula, and the effect of rounding."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from services.common.sampling_params import SamplingParams
from services.dense_worker.sampling.gumbel import draw, gumbel_noise
from services.dense_worker.sampling.sampler import Sampler

torch.set_num_threads(1)


def draw_all(logits: torch.Tensor, temperature: float, first_seed: int = 0, position: int = 5) -> torch.Tensor:
    """Draws one token per row, each with its own seed."""
    num_rows = len(logits)
    return draw(
        logits,
        np.full(num_rows, temperature, np.float32),
        np.arange(first_seed, first_seed + num_rows, dtype=np.uint64),
        np.full(num_rows, position, np.uint64),
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_frequencies_follow_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -torch.inf, -0.5, -1.0, -2.0, -3.0])
    num_draws = 40_000
    counts = draw_all(logits.repeat(num_draws, 1), temperature).bincount(minlength=len(logits))
    assert counts[4] == 0
    possible = logits > -torch.inf
    expected = (logits / temperature).softmax(-1)[possible] * num_draws
    chi_square = ((counts[possible] - expected) ** 2 / expected).sum()
    assert chi_square < 29.9  # 7 degrees of freedom: above with probability 1e-4


def test_large_vocabulary_is_drawn_evenly() -> None:
    """All tokens have the same probability. The sizes exceed those that are computed at a time."""
    vocab_size, num_draws = 20_001, 3_000
    drawn = draw_all(torch.zeros(1, vocab_size).expand(num_draws, -1), 1.0)
    counts = np.histogram(drawn.numpy(), bins=50, range=(0, vocab_size))[0]
    chi_square = ((counts - num_draws / 50) ** 2 / (num_draws / 50)).sum()
    assert chi_square < 95  # 49 degrees of freedom: above with probability 1e-4


def test_rare_tokens_are_drawn_with_their_probability() -> None:
    """Besides one likely token there are 100,000 tokens of probability 4e-7, together 4 %."""
    num_rare, num_draws = 100_000, 1_000
    logits = torch.zeros(1, 1 + num_rare)
    logits[0, 0] = math.log(0.96 / (0.04 / num_rare))
    drawn = [draw_all(logits.expand(100, -1), 1.0, first_seed) for first_seed in range(0, num_draws, 100)]
    num_drawn = int((torch.cat(drawn) > 0).sum())
    assert abs(num_drawn - 0.04 * num_draws) < 4 * math.sqrt(0.04 * num_draws)


def test_noise_is_exact_at_both_ends() -> None:
    words = np.array([0, 1, 2**31, 2**32 - 100, 2**32 - 2, 2**32 - 1], dtype=np.uint32)
    from_below = [-math.log(-math.log((word + 0.5) / 2**32)) for word in words.tolist()[:3]]
    from_above = [-math.log(-math.log1p(-(2**32 - 1 - word + 0.5) / 2**32)) for word in words.tolist()[3:]]
    np.testing.assert_allclose(gumbel_noise(words), from_below + from_above, rtol=1e-12)
    assert gumbel_noise(words)[-1] == pytest.approx(33 * math.log(2), rel=1e-9)


def test_equal_scores_give_the_lowest_token() -> None:
    logits = torch.zeros(3, 50)
    logits[0, 20:30] = torch.inf
    logits[1] = -torch.inf
    logits[2] = torch.nan
    assert draw_all(logits, 1.0).tolist() == [20, 0, 0]


def bfloat16_logits(num_rows: int, vocab_size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits distributed like a language model's, rounded in two ways, as by kernels that add in different orders."""
    generator = torch.Generator().manual_seed(seed)
    exact = torch.randn(num_rows, vocab_size, generator=generator) * 2.5
    half_units = [torch.rand(exact.shape, generator=generator) - 0.5 for _ in range(2)]
    first, second = ((exact * (1.0 + unit * 2.0**-8)).bfloat16().float() for unit in half_units)
    return first, second


def inverted_cdf(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    cumulative = logits.double().softmax(-1).cumsum(-1)
    return torch.searchsorted(cumulative, uniforms[:, None]).squeeze(1)


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(4_000, 4_096), (500, 32_768)])
def test_rounding_changes_few_tokens(num_rows: int, vocab_size: int) -> None:
    """Draws from p and q differ with a probability of at least TV(p, q), for every method of drawing. With Gumbel-max
    and common noise it is at most 2 TV / (1 + TV). Inverting the CDF has no such limit.
    """
    flips, flips_of_cdf, total_variation = 0, 0, 0.0
    generator = torch.Generator().manual_seed(1)
    for first_seed in range(0, num_rows, 100):
        first, second = bfloat16_logits(100, vocab_size, first_seed)
        flips += int((draw_all(first, 1.0, first_seed) != draw_all(second, 1.0, first_seed)).sum())
        uniforms = torch.rand(100, dtype=torch.float64, generator=generator)
        flips_of_cdf += int((inverted_cdf(first, uniforms) != inverted_cdf(second, uniforms)).sum())
        total_variation += float((first.softmax(-1) - second.softmax(-1)).abs().sum() / 2)
    most = 2 * total_variation / (1 + total_variation / num_rows)
    print(f"{vocab_size} tokens: of {num_rows} draws {flips} differ, by inverting the CDF {flips_of_cdf}; "
          f"{total_variation:.1f} to {most:.1f} must or may")  # fmt: skip
    assert flips <= most + 4 * math.sqrt(most)
    assert flips_of_cdf > 5 * flips


@pytest.mark.parametrize(
    "options", [{"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 50}, {"top_k": 20, "top_p": 0.95}], ids=str
)
def test_rounding_changes_few_tokens_of_filtered_distributions(options: dict[str, float]) -> None:
    """Rounding also changes which tokens the filters keep. The limit above does not contain this effect."""
    num_batches, num_rows, vocab_size = 10, 100, 4_096
    positions, output_lens = np.full(num_rows, 5), np.zeros(num_rows, dtype=np.int64)
    flips = 0
    for first_seed in range(0, num_batches * num_rows, num_rows):
        sampler = Sampler(num_rows, vocab_size, "cpu")
        for slot in range(num_rows):
            sampler.add(slot, SamplingParams(seed=first_seed + slot, **options), [0], [], [])
        token_ids = [
            sampler.sample(logits, range(num_rows), positions, output_lens).token_ids
            for logits in bfloat16_logits(num_rows, vocab_size, first_seed)
        ]
        flips += int((token_ids[0] != token_ids[1]).sum())
    print(f"{options}: of {num_batches * num_rows} draws {flips} differ")
    assert flips < 0.035 * num_batches * num_rows
