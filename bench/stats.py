"""The figures of all benchmarks, each computed from raw timestamps: TTFT, TPOT, ITL, percentiles, throughput.

Pure functions; no clock is read here. The definitions are those of `vllm bench serve`, so that the figures
can be compared:

TTFT  from sending a request to its first chunk with a token.
TPOT  from the first to the last such chunk, divided by the number of output tokens minus one. A request
      with a single output token has none.
ITL   from one such chunk to the next: one value per chunk, also where a chunk carries several tokens.
"""

# Not called statistics.py: the directory of a script comes first in its sys.path, where that name would hide
# the standard library's module from everything the script imports, torch included.

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What a client saw of one request. All times in ns since the start of the run."""

    index: int  # position in the workload
    scheduled_ns: int  # when the workload wanted it sent
    send_ns: int
    end_ns: int  # when its stream ended, well or not
    chunk_ns: list[int]  # arrival of each chunk, in order
    chunk_num_tokens: list[int]  # tokens of each chunk; 0 where it carries only text or the finish
    num_prompt_tokens: int  # as the server counted them
    num_cached_tokens: int  # prompt tokens that the server found in its prefix cache
    error: str | None  # what ended it early; its other figures are then not used


@dataclass(frozen=True, slots=True)
class Summary:
    """Of one kind of value; the unit is that of the values."""

    mean: float
    median: float
    p90: float
    p99: float
    min: float
    max: float


@dataclass(frozen=True, slots=True)
class ServingFigures:
    """Of one run. Counts and throughputs are those of successful requests; `None` where there is no value."""

    num_successful: int
    num_failed: int
    duration_s: float  # from the start of the run to the end of the last stream
    total_input_tokens: int
    total_cached_tokens: int
    total_output_tokens: int
    request_throughput: float  # requests/s
    input_throughput: float  # tokens/s
    output_throughput: float  # tokens/s
    ttft_ms: Summary | None
    tpot_ms: Summary | None
    itl_ms: Summary | None
    first_error: str | None  # of the request that failed first


def summarize(values: Sequence[float]) -> Summary | None:
    """Percentiles are interpolated linearly between the two nearest values; `None` without values."""
    if not values:
        return None
    array = np.asarray(values, dtype=np.float64)
    median, p90, p99 = np.percentile(array, [50, 90, 99]).tolist()
    return Summary(float(array.mean()), median, p90, p99, float(array.min()), float(array.max()))


def token_times_ns(record: RequestRecord) -> list[int]:
    """Arrivals of the chunks that carry tokens."""
    return [time for time, count in zip(record.chunk_ns, record.chunk_num_tokens, strict=True) if count]


def num_output_tokens(record: RequestRecord) -> int:
    """Tokens that arrived."""
    return sum(record.chunk_num_tokens)


def ttft_ms(record: RequestRecord) -> float | None:
    """Time to first token; `None` if no token came."""
    times = token_times_ns(record)
    return (times[0] - record.send_ns) / NS_PER_MS if times else None


def tpot_ms(record: RequestRecord) -> float | None:
    """Time per output token after the first; `None` with fewer than two tokens."""
    times, num_tokens = token_times_ns(record), num_output_tokens(record)
    return (times[-1] - times[0]) / (num_tokens - 1) / NS_PER_MS if num_tokens > 1 else None


def itls_ms(record: RequestRecord) -> list[float]:
    """Inter-token latencies, one for each chunk with tokens but the first."""
    times = token_times_ns(record)
    return [(later - earlier) / NS_PER_MS for earlier, later in itertools.pairwise(times)]


def serving_figures(records: Iterable[RequestRecord]) -> ServingFigures:
    """The figures of all requests of one run."""
    records = list(records)
    successful = [record for record in records if record.error is None]
    failed = sorted((record for record in records if record.error is not None), key=lambda record: record.end_ns)
    duration_s = max((record.end_ns for record in records), default=0) / NS_PER_S
    total_input_tokens = sum(record.num_prompt_tokens for record in successful)
    total_output_tokens = sum(map(num_output_tokens, successful))

    def rate(count: int) -> float:
        return count / duration_s if duration_s else 0.0

    return ServingFigures(
        num_successful=len(successful),
        num_failed=len(failed),
        duration_s=duration_s,
        total_input_tokens=total_input_tokens,
        total_cached_tokens=sum(record.num_cached_tokens for record in successful),
        total_output_tokens=total_output_tokens,
        request_throughput=rate(len(successful)),
        input_throughput=rate(total_input_tokens),
        output_throughput=rate(total_output_tokens),
        ttft_ms=summarize([value for record in successful if (value := ttft_ms(record)) is not None]),
        tpot_ms=summarize([value for record in successful if (value := tpot_ms(record)) is not None]),
        itl_ms=summarize([value for record in successful for value in itls_ms(record)]),
        first_error=failed[0].error if failed else None,
    )
