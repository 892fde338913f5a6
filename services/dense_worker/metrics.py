"""`DenseMetrics`: the Prometheus metrics of the dense worker; see `deploy/prometheus/metrics.md`.

Histograms are observed on the engine thread, a few times per step for any batch size. Counts that the engine keeps
anyway are read when a scraper asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from services.dense_worker.encoders.encoder import EncoderCounts
from services.dense_worker.engine.observer import CacheCounts, EngineCounts, StepStats
from services.dense_worker.engine.sequence import FinishReason, Sequence, SequenceOutput
from services.rpc.metrics import LATENCY_BUCKETS_S, STEP_BUCKETS_S

_STEPS_BETWEEN_COPIES = 64  # of the loads of experts


class DenseMetrics:
    """An `EngineObserver`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

        def histogram(name: str, buckets: Iterable[float], text: str) -> Histogram:
            return Histogram(f"twostroke_dense_{name}", text, registry=registry, buckets=tuple(buckets))

        def counter(name: str, text: str) -> Counter:
            return Counter(f"twostroke_dense_{name}", text, registry=registry)

        self._queue = histogram(
            "queue_seconds", LATENCY_BUCKETS_S, "From a sequence's arrival until its first step began."
        )
        self._prefill = histogram(
            "prefill_seconds", LATENCY_BUCKETS_S, "From the start of a sequence's first step until its first token."
        )
        self._decode = histogram(
            "decode_seconds", LATENCY_BUCKETS_S, "From a sequence's first token until its last."
        )
        self._step = histogram(
            "step_seconds", STEP_BUCKETS_S, "One step: from the end of the one before, or its launch if later."
        )
        self._step_compute = histogram(
            "step_compute_seconds", STEP_BUCKETS_S, "The dense worker's own part of a step. Empty on CUDA."
        )
        self._step_wait = histogram(
            "step_wait_seconds", STEP_BUCKETS_S, "The part of a step spent waiting for attention. Empty on CUDA."
        )
        self._computed_tokens = counter("computed_tokens_total", "Prompt and output tokens computed in steps.")
        self._generated_tokens = counter("generated_tokens_total", "Tokens sampled, those nobody waited for included.")
        self._step_seqs = counter("step_sequences_total", "Sum of the batch sizes of all steps.")
        self._recovered = counter(
            "recovered_sequences_total", "Sequences submitted again with their tokens so far, after a worker died."
        )
        self._handoff_aborts = counter("handoff_aborts_total", "Times the attention worker was lost.")

    def watch(self, read_counts: Callable[[], EngineCounts]) -> None:
        """Adds these counts to the metrics; `read_counts` is called on the scraper's thread."""
        self._registry.register(_CountsCollector(read_counts))

    def watch_experts(self, read_loads: Callable[[], dict[int, list[int]]]) -> None:
        """Adds the loads of experts by layer; `read_loads` is called on the scraper's thread."""
        self._registry.register(_ExpertCollector(read_loads))

    def watch_encoders(self, counts: Mapping[str, EncoderCounts]) -> None:
        """Adds the counts of encoders, by the names of their features; they are read on the scraper's thread."""
        self._registry.register(_EncoderCollector(counts))

    def watch_caches(
        self, read_caches: Callable[[], list[CacheCounts]], read_names: Callable[[], dict[int, str]]
    ) -> None:
        """Adds what each of several attention workers has; both are called on the scraper's thread.

        read_names: their addresses, by cache_id
        """
        self._registry.register(_CachesCollector(read_caches, read_names))

    def on_submitted(self, *, is_recovered: bool) -> None:
        """Counts the sequences that gateways have submitted again with tokens. Called on the event loop."""
        if is_recovered:
            self._recovered.inc()

    def on_step(self, stats: StepStats, started: Iterable[Sequence], outputs: Iterable[SequenceOutput]) -> None:
        """Observes the step in histograms and counters. Called on the engine thread."""
        if not stats.num_seqs:
            return  # the plan only closed sequences
        self._step.observe(stats.duration_s)
        if stats.wait_s is not None:
            self._step_wait.observe(stats.wait_s)
            self._step_compute.observe(stats.duration_s - stats.wait_s)
        self._computed_tokens.inc(stats.num_tokens)
        self._generated_tokens.inc(stats.num_sampled)
        self._step_seqs.inc(stats.num_seqs)
        for sequence in started:
            self._queue.observe(sequence.started_s - sequence.arrival_s)
        for output in outputs:
            sequence = output.sequence
            is_first = 0 < len(sequence.output_token_ids) == len(output.token_ids)
            if is_first and sequence.started_s is not None:
                self._prefill.observe(sequence.first_token_s - sequence.started_s)
            if output.finish_reason not in (None, FinishReason.ERROR):
                self._decode.observe(time.monotonic() - sequence.first_token_s)

    def on_handoff_abort(self) -> None:
        """Counts the loss of the attention worker."""
        self._handoff_aborts.inc()


class _CountsCollector:
    """Reads the engine's counts when a scraper asks."""

    def __init__(self, read_counts: Callable[[], EngineCounts]) -> None:
        self._read_counts = read_counts

    def collect(self) -> Iterator[Metric]:
        counts = self._read_counts()
        yield GaugeMetricFamily(
            "twostroke_dense_sequences_running", "Sequences that take part in steps.", counts.num_running
        )
        yield GaugeMetricFamily(
            "twostroke_dense_sequences_waiting", "Sequences in the waiting queue.", counts.num_waiting
        )
        yield GaugeMetricFamily(
            "twostroke_dense_attached", "1 while there is an attention worker, else 0.", int(counts.is_attached)
        )
        yield CounterMetricFamily(
            "twostroke_dense_preemptions",
            "Times that a sequence gave its blocks up, to go on later.",
            counts.num_preemptions,
        )
        yield CounterMetricFamily("twostroke_dense_steps", "Steps published.", counts.num_steps)


class _ExpertCollector:
    """Reads the loads of experts when a scraper asks. Labels are a layer or an expert, never both."""

    def __init__(self, read_loads: Callable[[], dict[int, list[int]]]) -> None:
        self._read_loads = read_loads

    def collect(self) -> Iterator[Metric]:
        loads = self._read_loads()
        tokens = CounterMetricFamily(
            "twostroke_dense_expert_tokens",
            "Tokens that chose the expert of this number, of all layers but the last.",
            labels=["expert"],
        )
        for expert, in_layers in enumerate(zip(*loads.values(), strict=True)):
            tokens.add_metric([str(expert)], sum(in_layers))
        yield tokens
        imbalance = GaugeMetricFamily(
            "twostroke_dense_expert_imbalance_ratio",
            "The tokens of a layer's busiest expert, divided by the mean of its experts, since the start; 1 is even.",
            labels=["layer"],
        )
        for layer, counts in loads.items():
            if any(counts):
                imbalance.add_metric([str(layer)], max(counts) * len(counts) / sum(counts))
        yield imbalance


class _EncoderCollector:
    """Reads the counts of encoders when a scraper asks. The label is the name of a feature, such as "images"."""

    def __init__(self, counts: Mapping[str, EncoderCounts]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        needed = CounterMetricFamily(
            "twostroke_dense_encoder_inputs",
            "Inputs of an encoder, such as pictures, in prompts that began to be computed.",
            labels=["encoder"],
        )
        computed = CounterMetricFamily(
            "twostroke_dense_encoder_computed_inputs",
            "Inputs that the encoder computed; the outputs of all others were kept.",
            labels=["encoder"],
        )
        rows = CounterMetricFamily(
            "twostroke_dense_encoder_computed_rows",
            "Rows that the encoder computed, such as the patches of pictures.",
            labels=["encoder"],
        )
        kept = GaugeMetricFamily(
            "twostroke_dense_encoder_cache_bytes", "Bytes of outputs that are kept.", labels=["encoder"]
        )
        for name, counts in self._counts.items():
            needed.add_metric([name], counts.num_hits)
            computed.add_metric([name], counts.num_encoded)
            rows.add_metric([name], counts.num_rows)
            kept.add_metric([name], counts.num_bytes)
        yield from (needed, computed, rows, kept)


class _CachesCollector:
    """Reads what the attention workers have when a scraper asks. The label is a worker's address."""

    def __init__(self, read_caches: Callable[[], list[CacheCounts]], read_names: Callable[[], dict[int, str]]) -> None:
        self._read_caches, self._read_names = read_caches, read_names

    def collect(self) -> Iterator[Metric]:
        gauges = [
            GaugeMetricFamily(f"twostroke_dense_attention_worker_{name}", text, labels=["worker"])
            for name, text in (
                ("sequences", "Running sequences whose keys and values are in this attention worker."),
                ("blocks", "Blocks of its KV cache."),
                ("free_blocks", "Of these, those that the scheduler knows to be free, cached prefixes included."),
            )
        ]
        names = self._read_names()
        for each in self._read_caches():
            values = each.num_sequences, each.num_blocks, each.num_free_blocks
            for gauge, value in zip(gauges, values, strict=True):
                gauge.add_metric([names.get(each.cache_id, "gone")], value)
        yield from gauges


class ExpertLoads:
    """How many tokens each expert has got. An `EngineObserver`.

    Steps count on the device, in kernels that run anyway. Every few steps the engine thread enqueues a copy to the
    host, which nothing waits for; a scraper reads the last copy.
    """

    def __init__(self, counts: Mapping[int, torch.Tensor]) -> None:
        """counts: int64 [num_experts] of each layer that counts, all on one device."""
        self._layers, self._counts = tuple(counts), tuple(counts.values())
        shape, device = (len(self._counts), len(self._counts[0])), self._counts[0].device
        self._copy = torch.zeros(shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._num_steps = 0

    def read(self) -> dict[int, list[int]]:
        """The tokens of each expert since the start, by layer, as of the last copy. Called on any thread."""
        return dict(zip(self._layers, self._copy.tolist(), strict=True))

    def on_step(self, stats: StepStats, started: Iterable[Sequence], outputs: Iterable[SequenceOutput]) -> None:
        """Enqueues a copy, after a few steps or if the worker has nothing left to run."""
        self._num_steps += 1
        if self._num_steps >= _STEPS_BETWEEN_COPIES or not stats.num_running:
            self._num_steps = 0
            self._copy.copy_(torch.stack(self._counts), non_blocking=True)

    def on_handoff_abort(self) -> None:
        """Counts stay: the tokens were computed."""
