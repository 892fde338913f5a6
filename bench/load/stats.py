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
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A client's record of one request. All times in ns since the start of the run."""

    index: int  # position in the workload
    scheduled_ns: int  # when the workload scheduled it
    send_ns: int
    end_ns: int  # when its stream ended, well or not
    chunk_ns: list[int]  # arrival of each chunk, in order
    chunk_num_tokens: list[int]  # tokens of each chunk; 0 where it carries only text or the finish
    num_prompt_tokens: int  # as the server counted them
    num_cached_tokens: int  # prompt tokens that the server found in its prefix cache
    error: str | None  # what ended it early; its other figures are then not used


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of one kind of value, in the unit of the values."""

    mean: float
    median: float
    p90: float
    p99: float
    min: float
    max: float


@dataclass(frozen=True, slots=True)
class ServingFigures:
    """The figures of one run. Counts and throughputs cover successful requests; `None` means no value."""

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
    first_error: str | None  # error of the request that failed first


@dataclass(frozen=True, slots=True)
class CoreFigures:
    """The figures of one run directly into the dense worker. Counts and rates cover successful requests."""

    num_requests: int
    total_latency_ms: float  # from sending the first request to the end of the last
    request_throughput: float  # requests/s
    output_throughput: float  # tokens/s
    latency_ms: Summary | None  # from sending a request to its end
    input_tokens_per_request: float
    output_tokens_per_request: float


@dataclass(frozen=True, slots=True)
class Trend:
    """A straight line through samples (least squares)."""

    start: float  # its value at the first sample
    slope_per_hour: float
    change: float  # of its value, from the first sample to the last
    noise: float  # standard deviation of the samples around it


@dataclass(frozen=True, slots=True)
class WireRun:
    """The record of one gateway between a stub and its clients. Times in ns of the monotonic clock."""

    start_ns: int  # of the measurement; streams began before and end after it
    end_ns: int
    cpu_s: dict[str, float]  # from start to end, of the processes: gateway, client, stub
    step_ns: list[int]  # when the stub sent each step
    first_step: list[int]  # by stream: the step of its first token
    chunk_ns: list[list[int]]  # by stream: arrivals of tokens at the client
    chunk_num_tokens: list[list[int]]  # by stream: number of tokens at each arrival
    num_messages: int  # over the whole life of the streams
    is_paced: bool  # whether steps came at a fixed pace; otherwise latencies have no meaning


@dataclass(frozen=True, slots=True)
class GatewayFigures:
    """The figures of one `WireRun`."""

    num_tokens: int  # tokens that arrived during the measurement
    output_throughput: float  # tokens/s
    cpu_us_per_token: float  # of the gateway
    tokens_per_cpu_s: float  # tokens per second of the gateway's CPU time
    tokens_per_message: float
    gateway_cores: float  # CPU seconds per second
    client_cores: float
    stub_cores: float
    added_ms: Summary | None  # latency of every token of a paced run, from the stub to the client
    first_of_step_ms: Summary | None  # the same for the token of each step that arrived first
    last_of_step_ms: Summary | None  # the same for the token that arrived last


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


def latency_ms(record: RequestRecord) -> float:
    """Milliseconds from sending a request to its end."""
    return (record.end_ns - record.send_ns) / NS_PER_MS


LIMITED_MS = {"ttft": ttft_ms, "tpot": tpot_ms, "e2el": latency_ms}  # latencies of a request, by vLLM's names


def request_goodput(records: Sequence[RequestRecord], limits_ms: Mapping[str, float]) -> float:
    """Successful requests/s that kept all of these limits, whose names are those of `LIMITED_MS`.

    As in vLLM, a latency that a request does not have, such as the TPOT of a single token, keeps every limit.
    """
    duration_s = max((record.end_ns for record in records), default=0) / NS_PER_S
    num_good = sum(
        record.error is None and all((LIMITED_MS[name](record) or 0.0) <= limit for name, limit in limits_ms.items())
        for record in records
    )
    return num_good / duration_s if duration_s else 0.0


def core_figures(records: Iterable[RequestRecord]) -> CoreFigures:
    """The statistics of all requests of one run of `bench/core.py`."""
    successful = [record for record in records if record.error is None]
    count = len(successful)
    span_ns = max((each.end_ns for each in successful), default=0) - min(
        (each.send_ns for each in successful), default=0
    )
    total_input_tokens = sum(record.num_prompt_tokens for record in successful)
    total_output_tokens = sum(map(num_output_tokens, successful))
    return CoreFigures(
        num_requests=count,
        total_latency_ms=span_ns / NS_PER_MS,
        request_throughput=count * NS_PER_S / span_ns if span_ns else 0.0,
        output_throughput=total_output_tokens * NS_PER_S / span_ns if span_ns else 0.0,
        latency_ms=summarize([latency_ms(record) for record in successful]),
        input_tokens_per_request=total_input_tokens / count if count else 0.0,
        output_tokens_per_request=total_output_tokens / count if count else 0.0,
    )


def trend(times_s: Sequence[float], values: Sequence[float]) -> Trend:
    """The line through at least two samples at different times."""
    times, samples = np.asarray(times_s, dtype=np.float64), np.asarray(values, dtype=np.float64)
    centred = times - times.mean()
    slope = float(centred @ samples / (centred @ centred))
    line = samples.mean() + slope * centred
    return Trend(float(line[0]), 3600 * slope, slope * float(times[-1] - times[0]), float((samples - line).std()))


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


def added_latencies_ms(run: WireRun) -> dict[int, list[float]]:
    """Latencies from the stub to the clients, by step, of every token of a paced run during the measurement."""
    latencies_ms: dict[int, list[float]] = defaultdict(list)
    for first_step, times, counts in zip(run.first_step, run.chunk_ns, run.chunk_num_tokens, strict=True):
        arrivals = np.repeat(np.asarray(times, dtype=np.int64), counts).tolist()  # one entry per token
        for step, arrival in enumerate(arrivals, first_step):
            is_measured = run.start_ns <= arrival < run.end_ns
            if is_measured and step < len(run.step_ns):  # the stub's report is older than the last arrivals
                latencies_ms[step].append((arrival - run.step_ns[step]) / NS_PER_MS)
    return latencies_ms


def gateway_figures(run: WireRun) -> GatewayFigures:
    """The figures of one run of `bench/gateway.py`."""
    duration_s = (run.end_ns - run.start_ns) / NS_PER_S
    num_tokens = sum(
        count
        for times, counts in zip(run.chunk_ns, run.chunk_num_tokens, strict=True)
        for time, count in zip(times, counts, strict=True)
        if run.start_ns <= time < run.end_ns
    )
    latencies_ms = added_latencies_ms(run) if run.is_paced else {}
    total_tokens = sum(map(sum, run.chunk_num_tokens))
    gateway_cpu_s = run.cpu_s["gateway"]
    return GatewayFigures(
        num_tokens=num_tokens,
        output_throughput=num_tokens / duration_s,
        cpu_us_per_token=1e6 * gateway_cpu_s / max(1, num_tokens),
        tokens_per_cpu_s=num_tokens / gateway_cpu_s if gateway_cpu_s else 0.0,
        tokens_per_message=total_tokens / max(1, run.num_messages),
        gateway_cores=gateway_cpu_s / duration_s,
        client_cores=run.cpu_s["client"] / duration_s,
        stub_cores=run.cpu_s["stub"] / duration_s,
        added_ms=summarize([value for step in latencies_ms.values() for value in step]),
        first_of_step_ms=summarize([min(step) for step in latencies_ms.values()]),
        last_of_step_ms=summarize([max(step) for step in latencies_ms.values()]),
    )
