"""The sampler gives the same tokens and log-probabilities on a GPU as on a CPU, and never waits for the device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from services.common.sampling_params import SamplingParams
from services.dense_worker.sampling.sampler import SampledTokens, Sampler

pytestmark = pytest.mark.gpu

VOCAB_SIZE, NUM_ROWS, NUM_STEPS = 32_000, 48, 6
# For sums of 32,000 exponentials in float32, which the GPU adds in another order.
TOLERANCE = 1e-4


def request_params(row: int) -> SamplingParams:
    """Options of sampling that differ by row: each option, and several together."""
    return SamplingParams(
        temperature=0.0 if row % 5 == 0 else 0.3 + 0.1 * (row % 7),
        top_k=50 if row % 3 == 0 else None,
        top_p=0.9 if row % 4 == 1 else 1.0,
        min_p=0.05 if row % 6 == 2 else 0.0,
        repetition_penalty=1.2 if row % 2 else 1.0,
        frequency_penalty=0.4 if row % 7 == 3 else 0.0,
        min_tokens=4 if row % 8 == 5 else 0,
        logit_bias=tuple((token_id, 6.0) for token_id in range(row, row + 9)) if row % 3 == 1 else (),
        bad_words=((row,), (row + 1, row + 2), tuple(range(row, row + 5))) if row % 3 == 1 else (),
        allowed_token_ids=tuple(range(row, 4000, 17)) if row % 9 == 4 else (),
        seed=row,
    )


def make_sampler(device: str) -> Sampler:
    sampler = Sampler(NUM_ROWS, VOCAB_SIZE, device)
    for row in range(NUM_ROWS):
        sampler.add(row, request_params(row), [row, 7, 9], [8] * (row % 3), [2, 3], 5 if row % 4 == 0 else None)
    return sampler


def sample_steps(device: str) -> Iterator[SampledTokens]:
    sampler = make_sampler(device)
    generator = torch.Generator().manual_seed(4)
    for step in range(NUM_STEPS):
        logits = (torch.randn(NUM_ROWS, VOCAB_SIZE, generator=generator) * 3.0).to(device)
        output_lens = np.arange(NUM_ROWS) % 3 + step
        if device != "cpu" and step:  # the first step loads libraries
            torch.cuda.set_sync_debug_mode("error")
        try:
            sampled = sampler.sample(logits, np.arange(NUM_ROWS), output_lens + 3, output_lens)
        finally:
            if device != "cpu":
                torch.cuda.set_sync_debug_mode("default")
        yield sampled


def test_tokens_and_logprobs_equal_those_of_the_cpu_and_nothing_waits() -> None:
    for on_cpu, on_gpu in zip(sample_steps("cpu"), sample_steps("cuda:0"), strict=True):
        assert on_gpu.token_ids.tolist() == on_cpu.token_ids.tolist()
        ranked = on_gpu.ranked.to_host()
        torch.cuda.synchronize()
        torch.testing.assert_close(ranked.logprobs, on_cpu.ranked.logprobs, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(ranked.top_logprobs, on_cpu.ranked.top_logprobs, rtol=0, atol=TOLERANCE)
        assert torch.equal(ranked.top_token_ids, on_cpu.ranked.top_token_ids)
        # Tokens whose logarithms round to one number on either device tie there.
        torch.testing.assert_close(ranked.ranks, on_cpu.ranked.ranks, rtol=0, atol=3)


def test_tokens_are_drawn_by_their_own_positions_however_late_the_device_runs_the_step() -> None:
    tokens: dict[str, list[list[int]]] = {}
    for device in ("cpu", "cuda:0"):
        sampler, slots = Sampler(4, VOCAB_SIZE, device), np.arange(4)
        for slot in range(4):
            sampler.add(slot, SamplingParams(temperature=1.0, seed=slot), [1], [], [2])
        logits, lens = torch.zeros(4, VOCAB_SIZE, device=device), np.zeros(4, np.int64)
        sampler.sample(logits, slots, lens, lens)  # loads libraries
        if device != "cpu":
            torch.cuda._sleep(200_000_000)  # a tenth of a second
        sampled = [sampler.sample(logits, slots, lens + step, lens).token_ids for step in range(12)]
        tokens[device] = [each.tolist() for each in sampled]
    assert tokens["cuda:0"] == tokens["cpu"]
    assert len({tuple(each) for each in tokens["cpu"]}) == 12
