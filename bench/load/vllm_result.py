"""The result of a run in the format of `vllm bench serve --save-result`, for programs that read its files.

Fields, names and units are those of vLLM 0.11 and later. What has no value here is left out or null: texts of answers
are not kept.
"""

from __future__ import annotations

import datetime
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.load.stats import (
    NS_PER_S,
    RequestRecord,
    itls_ms,
    latency_ms,
    num_output_tokens,
    request_goodput,
    serving_figures,
    tpot_ms,
    ttft_ms,
)

MS_PER_S = 1000


def vllm_result(
    records: Sequence[RequestRecord],
    *,
    model: str,
    protocol: str,
    request_rate: float,
    max_concurrency: int | None,
    is_poisson: bool,
    limits_ms: Mapping[str, float],
) -> dict[str, Any]:
    """The document. Latencies of single requests are in seconds, statistics in milliseconds, as there.

    limits_ms: those of `request_goodput`; empty: the goodput is null.
    """
    successful = [record for record in records if record.error is None]
    figures = serving_figures(records)
    document: dict[str, Any] = {
        "date": datetime.datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai" if protocol == "http" else protocol,
        "backend": "openai" if protocol == "http" else protocol,
        "label": "twostroke",
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": len(records),
        "request_rate": request_rate if math.isfinite(request_rate) else "inf",
        "burstiness": 1.0 if is_poisson else None,
        "max_concurrency": max_concurrency,
        "duration": figures.duration_s,
        "completed": figures.num_successful,
        "failed": figures.num_failed,
        "total_input_tokens": figures.total_input_tokens,
        "total_output_tokens": figures.total_output_tokens,
        "request_throughput": figures.request_throughput,
        "request_goodput": request_goodput(records, limits_ms) if limits_ms else None,
        "output_throughput": figures.output_throughput,
        "total_token_throughput": figures.input_throughput + figures.output_throughput,
        "max_output_tokens_per_s": _most_tokens_in_a_second(successful),
        "max_concurrent_requests": _most_in_flight(successful),
        "input_lens": [record.num_prompt_tokens for record in records],
        "output_lens": [num_output_tokens(record) for record in records],
        "ttfts": [(ttft_ms(record) or 0.0) / MS_PER_S for record in records],
        "itls": [[value / MS_PER_S for value in itls_ms(record)] for record in records],
        "errors": [record.error or "" for record in records],
    }
    for name, values in (
        ("ttft", [ttft_ms(record) for record in successful]),
        ("tpot", [tpot_ms(record) for record in successful]),
        ("itl", [value for record in successful for value in itls_ms(record)]),
        ("e2el", [latency_ms(record) for record in successful]),
    ):
        document |= _statistics(name, [value for value in values if value is not None])
    return document


def _statistics(name: str, values: list[float]) -> dict[str, float]:
    """As in vLLM, 0 without values."""
    array = np.asarray(values or [0.0])
    return {
        f"mean_{name}_ms": float(array.mean()),
        f"median_{name}_ms": float(np.median(array)),
        f"std_{name}_ms": float(array.std()),
        f"p99_{name}_ms": float(np.percentile(array, 99)),
    }


def _most_tokens_in_a_second(records: Sequence[RequestRecord]) -> float:
    counts: Counter[int] = Counter()
    for record in records:
        for time_ns, num_tokens in zip(record.chunk_ns, record.chunk_num_tokens, strict=True):
            counts[time_ns // NS_PER_S] += num_tokens
    return float(max(counts.values(), default=0))


def _most_in_flight(records: Sequence[RequestRecord]) -> int:
    changes = sorted([(record.send_ns, 1) for record in records] + [(record.end_ns, -1) for record in records])
    return max(itertools.accumulate(change for _, change in changes), default=0)
