"""The dense worker's metrics of steps and sequences: which times count."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from services.common.errors import RequestAborted
from services.common.sampling_params import SamplingParams
from services.dense_worker.encoders.encoder import EncoderCounts
from services.dense_worker.engine.observer import EngineCounts, StepStats
from services.dense_worker.engine.sequence import FinishReason, Sequence, SequenceOutput
from services.dense_worker.engine.step_report import record_first_tokens, record_started
from services.dense_worker.features.drafting.drafting import DraftCounts
from services.dense_worker.metrics import DenseMetrics, ExpertLoads
from tests.support.dense.sequences import new_sequence
from tests.support.scrape import Row, read_table


def make_stats(**fields: Any) -> StepStats:
    defaults = {name: 0 for name in StepStats.__dataclass_fields__}
    return StepStats(**(defaults | {"num_seqs": 1, "launch_s": 0.0, "duration_s": 0.004, "wait_s": 0.001} | fields))


def make_sequence(**fields: Any) -> Sequence:
    return new_sequence(1, "r", [5, 6, 7], SamplingParams(), max_tokens=9, **fields)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> DenseMetrics:
    return DenseMetrics(registry)


def value(registry: CollectorRegistry, name: str) -> float | None:
    return registry.get_sample_value(f"twostroke_dense_{name}")


def run_step(
    metrics: DenseMetrics,
    sequence: Sequence,
    begin_s: float,
    end_s: float,
    *,
    is_first: bool = False,
    finish_reason: FinishReason | None = None,
) -> None:
    """Runs a step in which the sequence gets a token."""
    started = record_started([sequence], begin_s)
    assert started == ([sequence] if is_first else [])
    sequence.output_token_ids.append(9)
    outputs = [SequenceOutput(sequence, (9,), finish_reason)]
    record_first_tokens(outputs, end_s)
    metrics.on_step(make_stats(num_sampled=1), started, outputs)


def test_drafts_are_counted_as_in_vllm(registry: CollectorRegistry, metrics: DenseMetrics) -> None:
    drafts = DraftCounts()
    for num_draft_tokens, num_accepted_tokens in ((4, 2), (3, 3), (5, 0)):
        drafts.add(num_draft_tokens, num_accepted_tokens)
    registry.register(drafts)
    assert value(registry, "spec_decode_num_drafts_total") == 3
    assert value(registry, "spec_decode_num_draft_tokens_total") == 12
    assert value(registry, "spec_decode_num_accepted_tokens_total") == 5
    name = "twostroke_dense_spec_decode_num_accepted_tokens_per_pos_total"
    at = [registry.get_sample_value(name, {"position": str(position)}) for position in range(6)]
    assert at == [2, 2, 1, 0, 0, None]


def test_loads_of_experts_are_added_up_by_expert_and_compared_by_layer(
    registry: CollectorRegistry, metrics: DenseMetrics
) -> None:
    counts = {1: torch.tensor([6, 0, 2]), 4: torch.tensor([1, 1, 1]), 5: torch.zeros(3, dtype=torch.int64)}
    loads = ExpertLoads(counts)
    metrics.watch_experts(loads.read)
    tokens, imbalance = "twostroke_dense_expert_tokens_total", "twostroke_dense_expert_imbalance_ratio"
    assert registry.get_sample_value(tokens, {"expert": "0"}) == 0, "nothing was copied"
    loads.on_step(make_stats(num_running=0), [], [])
    assert [registry.get_sample_value(tokens, {"expert": str(expert)}) for expert in range(4)] == [7, 1, 3, None]
    assert [registry.get_sample_value(imbalance, {"layer": str(layer)}) for layer in (1, 4, 5)] == [2.25, 1, None]
    rows = {row.name: row for row in read_table() if row.name.startswith("twostroke_dense_expert_")}
    for name, kind, label in ((tokens, "counter", "expert"), (imbalance, "gauge", "layer")):
        [family] = [each for each in registry.collect() if each.name == name.removesuffix("_total")]
        assert rows.pop(name) == Row(name, kind, frozenset([label]), frozenset(["dense"]), family.documentation)
        assert family.type == kind and all(set(sample.labels) == {label} for sample in family.samples)
    assert not rows
    counts[4][1] = 100
    for _ in range(63):
        loads.on_step(make_stats(num_running=1), [], [])
    assert registry.get_sample_value(tokens, {"expert": "1"}) == 1, "copies are made every 64 steps while some run"
    loads.on_step(make_stats(num_running=1), [], [])
    assert registry.get_sample_value(tokens, {"expert": "1"}) == 100


def test_encoders_are_counted_by_name(registry: CollectorRegistry, metrics: DenseMetrics) -> None:
    counts = EncoderCounts(num_hits=5, num_encoded=2, num_rows=90, num_bytes=4096)
    metrics.watch_encoders({"images": counts})
    rows = {row.name: row for row in read_table() if row.name.startswith("twostroke_dense_encoder_")}
    for name, expected in (
        ("inputs_total", 5),
        ("computed_inputs_total", 2),
        ("computed_rows_total", 90),
        ("cache_bytes", 4096),
    ):
        full_name = f"twostroke_dense_encoder_{name}"
        assert registry.get_sample_value(full_name, {"encoder": "images"}) == expected
        [family] = [each for each in registry.collect() if each.name == full_name.removesuffix("_total")]
        row = Row(full_name, family.type, frozenset(["encoder"]), frozenset(["dense"]), family.documentation)
        assert rows.pop(full_name) == row
    assert not rows


def test_sequence_time_is_queue_prefill_and_decode(registry: CollectorRegistry, metrics: DenseMetrics) -> None:
    now_s = time.monotonic()
    sequence = make_sequence(arrival_s=now_s - 10)
    run_step(metrics, sequence, now_s - 8, now_s - 3, is_first=True)
    run_step(metrics, sequence, now_s - 3, now_s - 2)
    run_step(metrics, sequence, now_s - 2, now_s, finish_reason=FinishReason.LENGTH)
    assert value(registry, "queue_seconds_sum") == pytest.approx(2)
    assert value(registry, "prefill_seconds_sum") == pytest.approx(5)
    assert value(registry, "decode_seconds_sum") == pytest.approx(3, abs=0.5)
    assert [value(registry, f"{name}_seconds_count") for name in ("queue", "prefill", "decode")] == [1, 1, 1]
    assert value(registry, "generated_tokens_total") == 3


def test_a_recovered_sequence_has_no_queue_and_no_prefill(registry: CollectorRegistry, metrics: DenseMetrics) -> None:
    sequence = make_sequence(arrival_s=time.monotonic(), output_token_ids=[3, 4])
    metrics.on_submitted(is_recovered=True)
    now_s = time.monotonic()
    run_step(metrics, sequence, now_s, now_s)
    run_step(metrics, sequence, now_s, now_s, finish_reason=FinishReason.STOP)
    assert value(registry, "recovered_sequences_total") == 1
    assert [value(registry, f"{name}_seconds_count") for name in ("queue", "prefill", "decode")] == [0, 0, 1]


def test_a_failed_sequence_has_no_decode_time(registry: CollectorRegistry, metrics: DenseMetrics) -> None:
    sequence = make_sequence()
    outputs = [SequenceOutput(sequence, (), FinishReason.ERROR, RequestAborted("no"))]
    record_first_tokens(outputs, 1.0)
    metrics.on_step(make_stats(), [], outputs)
    assert value(registry, "decode_seconds_count") == 0


def test_the_time_of_a_step_is_split_into_compute_and_wait(registry: CollectorRegistry, metrics: DenseMetrics) -> None:
    metrics.on_step(make_stats(num_seqs=3, num_tokens=20, duration_s=0.005, wait_s=0.002), [], [])
    assert value(registry, "step_seconds_sum") == pytest.approx(0.005)
    assert value(registry, "step_wait_seconds_sum") == pytest.approx(0.002)
    assert value(registry, "step_compute_seconds_sum") == pytest.approx(0.003)
    assert value(registry, "computed_tokens_total") == 20
    assert value(registry, "step_sequences_total") == 3


def test_without_a_wait_time_a_step_is_not_split(registry: CollectorRegistry, metrics: DenseMetrics) -> None:
    metrics.on_step(make_stats(wait_s=None), [], [])
    assert [value(registry, f"{name}_seconds_count") for name in ("step", "step_wait", "step_compute")] == [1, 0, 0]


def test_a_step_that_only_closes_sequences_does_not_count(registry: CollectorRegistry, metrics: DenseMetrics) -> None:
    metrics.on_step(make_stats(num_seqs=0), [], [])
    assert value(registry, "step_seconds_count") == 0


def test_counts_are_read_at_each_scrape(registry: CollectorRegistry, metrics: DenseMetrics) -> None:
    counts = [EngineCounts(3, 1, 2, 10, 1, True), EngineCounts(0, 0, 0, 20, 1, False)]
    metrics.watch(lambda: counts[0])
    names = ("sequences_waiting", "sequences_running", "steps_total", "preemptions_total", "attached")
    assert [value(registry, name) for name in names] == [3, 2, 10, 1, 1]
    del counts[0]
    assert [value(registry, name) for name in names] == [0, 0, 20, 1, 0]
