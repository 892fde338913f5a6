"""Microseconds of the sampler for one step, by rows, vocabulary and filters, compared with an inverted CDF.

`python bench/sampler.py --device cuda` prints the table; `--editors` prints that of greedy steps by editor of logits.
"inverse CDF" is the same sampler with another draw: integer weights of the filtered logits, their cumulative sum, and
a search in it for one random number per row.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from bench.gpu.device_rates import require_gpu, time_events
from services.common.sampling_params import SamplingParams
from services.dense_worker.sampling.sampler import Sampler
from services.dense_worker.sampling.token_filters import WEIGHT_ONE
from services.dense_worker.sampling.upload import upload

FILTERS = {"none": {}, "top_p 0.9": {"top_p": 0.9}, "top_k 50": {"top_k": 50}}
EDITED = {
    "none": {},
    "logit_bias": {"logit_bias": ((3, 1.0),)},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.1},
    "bad_words": {"bad_words": ((3,), (4, 5))},
    "min_tokens": {"min_tokens": 1_000_000},
    "allowed_token_ids": {"allowed_token_ids": (1, 2, 3)},
}
CALLS = 10  # in a row, so that the GPU has work while the host prepares more
WARM_UP = 3


def invert_cdf(
    logits: torch.Tensor, temperatures: np.ndarray, seeds: np.ndarray, positions: np.ndarray
) -> torch.Tensor:
    """Replaces `gumbel.draw`. Its random numbers have no keys, which would not change the time."""
    uniforms = np.random.default_rng(int(seeds[0])).random(len(seeds))
    uniforms, temperature = upload(np.stack((uniforms, temperatures)), logits.device)[..., None]
    highest = logits.amax(-1, keepdim=True)
    weights = (logits - highest).div_(temperature.float()).exp_().mul_(WEIGHT_ONE).long()
    cumulative = weights.cumsum(-1)
    target = (uniforms * cumulative[:, -1:]).long()
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def time_step_us(num_rows: int, vocab_size: int, options: dict[str, Any], device: str, is_inverted: bool) -> float:
    """Median microseconds of `Sampler.sample` for rows that all have these options."""
    sampler = Sampler(num_rows, vocab_size, device)
    if is_inverted:
        sampler._draw_tokens = invert_cdf
    for slot in range(num_rows):
        sampler.add(slot, SamplingParams(**{"temperature": 0.8, "seed": slot, **options}), [1], [], [2])
    logits = torch.randn(num_rows, vocab_size, device=device) * 2.5
    slots, positions, output_lens = np.arange(num_rows), np.full(num_rows, 7), np.zeros(num_rows, dtype=np.int64)

    def step() -> None:
        sampler.sample(logits, slots, positions, output_lens)

    for _ in range(WARM_UP):
        step()
    return _time_on_gpu(step) if device == "cuda" else _time_on_cpu(step)


def _time_on_gpu(step: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    return time_events(lambda: [step() for _ in range(CALLS)]) / CALLS


def _time_on_cpu(step: Callable[[], None]) -> float:
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=[32_000, 128_256])
    parser.add_argument("--editors", action="store_true", help="time greedy steps by the options that edit logits")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        require_gpu("triton")
    if arguments.editors:
        print_editors(arguments)
        return
    print("| rows | vocabulary | filters | Gumbel-max, µs | inverse CDF, µs |\n|---|---|---|---|---|")
    for num_rows in arguments.rows:
        for vocab_size in arguments.vocab_sizes:
            for name, filters in FILTERS.items():
                times = [
                    time_step_us(num_rows, vocab_size, filters, arguments.device, is_inverted)
                    for is_inverted in (False, True)
                ]
                print(f"| {num_rows} | {vocab_size} | {name} | {times[0]:.0f} | {times[1]:.0f} |", flush=True)


def print_editors(arguments: argparse.Namespace) -> None:
    print("| rows | vocabulary | all rows have | µs |\n|---|---|---|---|")
    for num_rows in arguments.rows:
        for vocab_size in arguments.vocab_sizes:
            for name, options in EDITED.items():
                greedy = {"temperature": 0.0, **options}
                us = time_step_us(num_rows, vocab_size, greedy, arguments.device, is_inverted=False)
                print(f"| {num_rows} | {vocab_size} | {name} | {us:.0f} |", flush=True)


if __name__ == "__main__":
    main()
