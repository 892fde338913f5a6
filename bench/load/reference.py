"""Figures of other servers, measured on the same kind of card, for comparison in plots."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """One load of a serving benchmark; times in ms."""

    label: str
    request_rate: float | None  # requests/s; None: one request at a time
    output_throughput: float  # tokens/s
    ttft_mean: float
    ttft_median: float
    ttft_p99: float
    tpot_mean: float
    itl_median: float
    itl_p99: float


# vLLM 0.25.1, Llama-2-7B bf16, one H200, `vllm bench serve`: prompts of 235 and outputs of 212 tokens, 50 % around.
VLLM_NAME = "vLLM 0.25.1, Llama-2-7B, H200"
VLLM_RUNS = (
    ReferenceRun("one at a time", None, 214, 16.3, 15.1, 27.9, 4.61, 4.61, 5.59),
    ReferenceRun("2 requests/s", 2, 414, 19.7, 19.8, 24.7, 4.78, 4.76, 5.96),
    ReferenceRun("16 requests/s", 16, 3259, 25.4, 24.8, 37.2, 6.16, 5.87, 11.1),
    ReferenceRun("all 1,000 at once", float("inf"), 8202, 5014, 3778, 19978, 73.5, 54.0, 396),
)


def nearest_run(request_rate: float) -> ReferenceRun:
    """The reference run with the nearest rate on a logarithmic scale. Infinite rates only match each other."""
    rated = [run for run in VLLM_RUNS if run.request_rate is not None]
    if request_rate == float("inf"):
        return rated[-1]
    finite = [run for run in rated if run.request_rate not in (None, float("inf"))]
    return min(finite, key=lambda run: max(run.request_rate / request_rate, request_rate / run.request_rate))
