"""`GatewayMetrics`: the Prometheus metrics of the gateway; see `deploy/prometheus/metrics.md`.

Everything runs in the event loop. A chunk costs one observation of a histogram. Counts that the journal and the dense
client keep anyway are read when a scraper asks, on the scraper's thread.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from services.common.errors import TwostrokeError
from services.gateway.link.dense_pool import DensePool
from services.gateway.link.journal import Journal
from services.gateway.link.journal_entry import Timings
from services.rpc.metrics import LATENCY_BUCKETS_S

FINISHED = ("stop", "length", "abort")
OUTCOMES = (*FINISHED, "cancelled", "error")
_BOUNDS_S = (-math.inf, *LATENCY_BUCKETS_S, math.inf)  # of the buckets


@dataclass(frozen=True, slots=True)
class EndedAnswer:
    """What is measured of an answer that has ended; counts are tokens."""

    outcome: str  # one of `OUTCOMES`
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    timings: Timings
    n: int  # answers that its request asked for
    max_tokens: int  # that it could have had


class GatewayMetrics:
    """Metrics of answers: a request with n answers counts n times, and so do its prompt's tokens, as in `Usage`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._collectors: list[Collector] = []
        self._end_observers: list[Callable[[EndedAnswer], None]] = []

        def histogram(name: str, text: str) -> Histogram:
            made = Histogram(f"twostroke_gateway_{name}", text, registry=registry, buckets=LATENCY_BUCKETS_S)
            self._collectors.append(made)
            return made

        def counter(name: str, text: str, labels: Iterable[str] = ()) -> Counter:
            made = Counter(f"twostroke_gateway_{name}", text, labels, registry=registry)
            self._collectors.append(made)
            return made

        def of_chunks(name: str, text: str) -> _ChunkHistogram:
            made = _ChunkHistogram(f"twostroke_gateway_{name}", text)
            registry.register(made)
            self._collectors.append(made)
            return made

        self._first_token = of_chunks(
            "time_to_first_token_seconds", "From a request's acceptance until its answer's first token."
        )
        self._inter_token = of_chunks(
            "inter_token_latency_seconds", "From one chunk of an answer that carries tokens to the next."
        )
        self.on_first_tokens = self._first_token.observe  # called when an answer's first tokens arrive
        self.on_more_tokens = self._inter_token.observe  # called when further tokens arrive, for each chunk
        self._per_token = histogram(
            "time_per_output_token_seconds", "Mean time from one token of an answer to the next, once an answer."
        )
        self._duration = histogram(
            "request_duration_seconds", "From a request's acceptance until the end of a finished answer."
        )
        self._loop_delay = histogram(
            "event_loop_delay_seconds",
            "How late the event loop woke a sleeper, 50 times a second: how long one call kept it.",
        )
        answers = counter("answers_total", "Answers that ended, by how.", ["outcome"])
        self._answers = {outcome: answers.labels(outcome) for outcome in OUTCOMES}
        self._rejected = counter(
            "requests_rejected_total", "Requests refused before their first token, by the error's code.", ["reason"]
        )
        self._prompt_tokens = counter("prompt_tokens_total", "Prompt tokens of ended answers.")
        self._cached_tokens = counter(
            "cached_tokens_total", "Prompt tokens of ended answers that were found in the prefix cache."
        )

    def watch(self, journal: Journal, dense: DensePool) -> None:
        """Adds what these count anyway."""
        counts = _CountsCollector(self, journal, dense)
        self._registry.register(counts)
        self._collectors.append(counts)

    def watch_ends(self, observe: Callable[[EndedAnswer], None]) -> None:
        """Has `observe` called in the event loop for every answer that ends."""
        self._end_observers.append(observe)

    def collect(self) -> Iterator[Metric]:
        """All of these metrics, for a collector that shows them under other names, too."""
        for each in self._collectors:
            yield from each.collect()

    def on_loop_delay(self, delay_s: float) -> None:
        """Observes one delay of the event loop."""
        self._loop_delay.observe(delay_s)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens passed to the handlers of clients."""
        return self._first_token.num_tokens + self._inter_token.num_tokens

    def on_end(self, answer: EndedAnswer) -> None:
        """Called when an answer ends."""
        self._answers[answer.outcome].inc()
        self._prompt_tokens.inc(answer.num_prompt_tokens)
        self._cached_tokens.inc(answer.num_cached_tokens)
        if answer.outcome in FINISHED:  # the duration of others does not depend on the server
            self._duration.observe(answer.timings.total_s)
            if answer.timings.per_token_s is not None:
                self._per_token.observe(answer.timings.per_token_s)
        for observe in self._end_observers:
            observe(answer)

    def on_rejected(self, error: TwostrokeError) -> None:
        """Called when a request is refused."""
        self._rejected.labels(error.code).inc()

    @contextmanager
    def noting_rejection(self) -> Iterator[None]:
        """A context that refuses a request if it raises a `TwostrokeError`."""
        try:
            yield
        except TwostrokeError as error:
            self.on_rejected(error)
            raise


class _ChunkHistogram(Collector):
    """How long chunks took to come, and their tokens. Only the event loop changes it.

    prometheus_client's histogram takes two locks and 0.7 us for each value.
    """

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = name, text
        self.num_tokens = 0
        self._counts = [0] * (len(LATENCY_BUCKETS_S) + 1)  # of each bucket alone, the last without a bound
        self._sum_s = 0.0
        self._index, self._above_s, self._most_s = 0, math.inf, -math.inf  # the bucket of the last value and its bounds

    def observe(self, num_tokens: int, latency_s: float) -> None:
        """Adds a chunk of `num_tokens` that took so long."""
        self.num_tokens += num_tokens
        self._sum_s += latency_s
        if not self._above_s < latency_s <= self._most_s:  # most take about as long as the one before
            self._find_bucket(latency_s)
        self._counts[self._index] += 1

    def _find_bucket(self, value_s: float) -> None:
        self._index = index = bisect_left(LATENCY_BUCKETS_S, value_s)
        self._above_s, self._most_s = _BOUNDS_S[index], _BOUNDS_S[index + 1]

    def collect(self) -> Iterator[Metric]:
        bounds = [*map(floatToGoString, LATENCY_BUCKETS_S), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum_s)


class _CountsCollector(Collector):
    """Reads counts when a scraper asks, on its thread."""

    def __init__(self, metrics: GatewayMetrics, journal: Journal, dense: DensePool) -> None:
        self._metrics, self._journal, self._dense = metrics, journal, dense

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "twostroke_gateway_answers_open", "Answers that have not ended, waiting ones included.", len(self._journal)
        )
        yield GaugeMetricFamily(
            "twostroke_gateway_answers_waiting",
            "Answers that have not been in a step yet.",
            self._journal.waiting.own,
        )
        yield GaugeMetricFamily(
            "twostroke_gateway_connected", "1 while there is a dense worker, else 0.", int(self._dense.is_connected)
        )
        yield CounterMetricFamily(
            "twostroke_gateway_generated_tokens", "Output tokens of all answers.", self._metrics.num_generated_tokens
        )
        yield CounterMetricFamily(
            "twostroke_gateway_recovered_sequences",
            "Sequences under way that were submitted again after the dense worker was lost.",
            self._dense.num_resubmitted,
        )
