"""TensorRTBackend on the recorded stand-in of every TensorRT API: results, addresses, order, errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.common.errors import ConfigError, TwostrokeError
from services.common.model_config import ModelConfig, load_model_config
from services.dense_worker.backends import InputEmbeds
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.weights import load_weights
from services.dense_worker.parameters import tensors_by_name, with_tensors
from services.dense_worker.tensorrt import engine_segments
from services.dense_worker.tensorrt.api import TensorRT
from services.dense_worker.tensorrt.backend import TensorRTBackend
from services.dense_worker.tensorrt.engine_plan_builder import EnginePlanBuilder
from services.dense_worker.tensorrt.engine_plan_cache import EnginePlanCache, EnginePlans
from services.dense_worker.tensorrt.engine_segments import TensorRTSegments
from services.dense_worker.tensorrt.export_check import OneSequenceAttention, greedy
from services.dense_worker.tensorrt.gpu import Gpu
from services.dense_worker.tensorrt.onnx_segments import export_networks
from services.dense_worker.tensorrt.profiles import Limits, parse_profiles
from services.step import StepPlan
from tests.support.dense.steps import Step, run_step
from tests.support.models import make_model_dir
from tests.support.workers.fake_tensorrt import FakeTensorRT, make_tensorrt

torch.set_num_threads(1)
CPU = torch.device("cpu")
STREAM = 7
PROFILES = parse_profiles("1-4,5-16,17-64")
LIMITS = Limits(num_tokens=16, num_rows=4)
GPU = Gpu("GPU A", (12, 0), 100)
APIS = [("8.6.0", False), ("10.0.1", False), ("11.4.0", False), ("1.7.1", True)]


@pytest.fixture(autouse=True)
def cpu_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_segments, "ALIGNMENT_BYTES", 64)  # torch's on a CPU; on a GPU it is 512


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="module")
def config(model_dir: Path) -> ModelConfig:
    return load_model_config(model_dir)


@pytest.fixture(scope="module")
def weights(model_dir: Path, config: ModelConfig) -> ModelWeights:
    return load_weights(model_dir, config, torch.float32, CPU)


@pytest.fixture(scope="module")
def networks(config: ModelConfig) -> dict[str, bytes]:
    return export_networks(config, torch.float32)


def build(trt: FakeTensorRT, networks: dict[str, bytes], directory: Path) -> EnginePlans:
    builder = EnginePlanBuilder(TensorRT(trt), GPU, PROFILES, EnginePlanCache(directory))
    return builder.find_or_build(networks, torch.float32, None, lambda line: None)


def run_once(backend: Any, config: ModelConfig, num_tokens: int, rows: list[int]) -> torch.Tensor:
    """One step with a stand-in for attention that mixes the tokens."""
    qkv = torch.full((num_tokens + 2, config.qkv_size), torch.nan)[:num_tokens]
    residual = backend.first(torch.arange(num_tokens) % config.vocab_size, qkv)
    for layer in range(config.num_layers):
        attn_out = qkv[:, : config.attn_size].flip(0).contiguous()
        if layer + 1 < config.num_layers:
            residual = backend.middle(layer, attn_out, residual, qkv)
    return backend.last(attn_out, residual, torch.tensor(rows))


@pytest.fixture
def trt() -> FakeTensorRT:
    return make_tensorrt("11.4.0")


@pytest.fixture
def segments(
    trt: FakeTensorRT, networks: dict[str, bytes], weights: ModelWeights, config: ModelConfig, tmp_path: Path
) -> TensorRTSegments:
    plans = build(trt, networks, tmp_path)
    return TensorRTSegments(TensorRT(trt), plans, weights, config, LIMITS, lambda: STREAM)


@pytest.mark.parametrize(("version", "is_rtx"), APIS)
def test_generation_equals_transformers_with_every_api(
    version: str,
    is_rtx: bool,
    model_dir: Path,
    networks: dict[str, bytes],
    weights: ModelWeights,
    config: ModelConfig,
    tmp_path: Path,
) -> None:
    trt = make_tensorrt(version, is_rtx=is_rtx)
    plans = build(trt, networks, tmp_path)
    segments = TensorRTSegments(TensorRT(trt), plans, weights, config, LIMITS, lambda: STREAM)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    prompt = [3, 14, 15, 92, 65, 35]
    with torch.inference_mode():
        attention = OneSequenceAttention(model, config)
        found = greedy(TensorRTBackend(segments), attention, config, torch.float32, prompt, 8)
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert found == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("num_tokens", "rows"), [(1, [0]), (4, [3, 1]), (5, [4]), (16, [0, 5, 15, 5])])
def test_logits_equal_torch_in_every_profile(
    segments: TensorRTSegments, weights: ModelWeights, config: ModelConfig, num_tokens: int, rows: list[int]
) -> None:
    found = run_once(TensorRTBackend(segments), config, num_tokens, rows)
    expected = run_once(TorchBackend(weights), config, num_tokens, rows)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_vectors_are_left_to_torch(segments: TensorRTSegments, weights: ModelWeights, config: ModelConfig) -> None:
    by_torch = TorchBackend(weights)
    assert not TensorRTBackend(segments).takes_input_embeds
    backend = TensorRTBackend(segments, by_torch)
    assert backend.takes_input_embeds
    token_ids, qkv, expected_qkv = torch.tensor([1, 2, 3]), *torch.empty(2, 3, config.qkv_size)
    given = InputEmbeds(torch.tensor([1]), torch.randn(1, config.hidden_size))
    residual = backend.first(token_ids, qkv, given)
    assert torch.equal(residual, by_torch.first(token_ids, expected_qkv, given)) and torch.equal(qkv, expected_qkv)
    assert torch.equal(residual[1], given.vectors[0])
    attn_out, added = torch.randn(3, config.attn_size), InputEmbeds(given.rows, torch.randn(1, config.hidden_size))
    found, expected = (each.middle(0, attn_out, residual, qkv, added) for each in (backend, by_torch))
    assert torch.equal(found, expected)
    assert not torch.allclose(found, by_torch.middle(0, attn_out, residual, qkv))


def test_weights_and_the_data_region_are_bound_by_their_own_addresses(
    trt: FakeTensorRT, segments: TensorRTSegments, weights: ModelWeights, config: ModelConfig
) -> None:
    qkv, attn_out = torch.empty(3, config.qkv_size), torch.zeros(3, config.attn_size)
    backend = TensorRTBackend(segments)
    residual = backend.first(torch.tensor([1, 2, 3]), qkv)
    trt.calls.clear()
    backend.middle(1, attn_out, residual, qkv)
    bound = {name: address for _, _, _, name, address in trt.named("set_tensor_address")}
    assert bound["qkv"] == qkv.data_ptr() and bound["attn_out"] == attn_out.data_ptr()
    tensors = dict(weights.named_tensors())
    assert bound["o_weight"] == tensors["layers.1.o_weight"].data_ptr()
    assert bound["gate_up_weight"] == tensors["layers.1.gate_up_weight"].data_ptr()
    assert bound["qkv_weight"] == tensors["layers.2.qkv_weight"].data_ptr()
    assert bound["residual"] != bound["residual_out"]


def test_one_context_per_profile_that_the_limits_reach_on_one_shared_memory(
    trt: FakeTensorRT, segments: TensorRTSegments
) -> None:
    profiles = [call[1:3] for call in trt.named("set_optimization_profile_async")]
    assert sorted(profiles) == [("first", 4), ("first", 16), ("last", 4), ("middle", 4), ("middle", 16)]
    memories = trt.named("device_memory")
    assert len(memories) == 5 and len({address for *_, address in memories}) == 1
    assert segments._runs._memory.numel() == 16_000 + len("middle")  # as the largest profile in use needs


def test_a_step_sets_shapes_and_addresses_then_runs_on_the_callers_stream(
    trt: FakeTensorRT, segments: TensorRTSegments, config: ModelConfig
) -> None:
    trt.calls.clear()
    run_once(TensorRTBackend(segments), config, 5, [4])
    runs = trt.named("execute_async_v3")
    assert runs == [
        ("execute_async_v3", "first", 16, STREAM),
        ("execute_async_v3", "middle", 16, STREAM),
        ("execute_async_v3", "middle", 16, STREAM),
        ("execute_async_v3", "last", 4, STREAM),  # by its one row, though there are five tokens
    ]
    names = {"set_input_shape", "set_tensor_address", "execute_async_v3"}
    assert {call[0] for call in trt.calls} == names  # nothing else, no profile switch and no wait
    of_first = trt.calls[: trt.calls.index(runs[0])]
    assert [call[3] for call in of_first][:1] == ["embeddings"]
    assert trt.named("set_input_shape") == [
        ("set_input_shape", "first", 16, "embeddings", (5, config.hidden_size)),
        ("set_input_shape", "middle", 16, "attn_out", (5, config.attn_size)),
        ("set_input_shape", "middle", 16, "residual", (5, config.hidden_size)),
        ("set_input_shape", "last", 4, "attn_out", (1, config.attn_size)),
        ("set_input_shape", "last", 4, "residual", (1, config.hidden_size)),
    ]


def test_a_second_step_of_the_same_size_changes_no_shape(
    trt: FakeTensorRT, segments: TensorRTSegments, config: ModelConfig
) -> None:
    backend = TensorRTBackend(segments)
    run_once(backend, config, 5, [4])
    trt.calls.clear()
    run_once(backend, config, 5, [2])
    assert not trt.named("set_input_shape")
    run_once(backend, config, 6, [2])
    assert {call[1] for call in trt.named("set_input_shape")} == {"first", "middle"}
    trt.calls.clear()
    run_once(backend, config, 6, [2, 3])
    assert {call[1] for call in trt.named("set_input_shape")} == {"last"}


def capture(
    trt: FakeTensorRT, monkeypatch: pytest.MonkeyPatch, backend: TensorRTBackend, config: ModelConfig, num_tokens: int
) -> list[int]:
    """Runs and then captures a step; returns the numbers of the contexts that the graph depends on."""
    run_once(backend, config, num_tokens, [0])
    with monkeypatch.context() as patch:
        patch.setattr(trt, "is_capturing", True)
        patch.setattr(engine_segments, "is_capturing", lambda: True)
        trt.calls.clear()
        trt.runs.clear()
        run_once(backend, config, num_tokens, [0])
    assert {call[0] for call in trt.calls} == {"set_tensor_address", "execute_async_v3"}  # what a graph can hold
    return list(trt.runs)


@pytest.mark.parametrize(("version", "is_rtx"), APIS)
def test_graphs_of_different_sizes_have_contexts_of_their_own(
    version: str,
    is_rtx: bool,
    networks: dict[str, bytes],
    weights: ModelWeights,
    config: ModelConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of `last` have one for each number of rows, here one.

    The stand-in refuses any change to the shapes of a context that a graph depends on.

    As 8.6.0 on a GPU, it ends the process if two contexts have one profile of a plan that does not allow it.
    """
    trt = make_tensorrt(version, is_rtx=is_rtx)
    plans = build(trt, networks, tmp_path)
    segments = TensorRTSegments(TensorRT(trt), plans, weights, config, LIMITS, lambda: STREAM)
    backend = TensorRTBackend(segments)
    contexts = {size: capture(trt, monkeypatch, backend, config, size) for size in (4, 3, 1, 16, 5)}
    for size, (*own, of_last) in contexts.items():
        assert len({*own, of_last}) == 3  # first, middle (for all layers), last
        for other, (*others, of_other_last) in contexts.items():
            assert of_last == of_other_last and (size == other or not set(own) & set(others))
    trt.runs.clear()
    for num_tokens in (5, 2, 16, 3):
        run_once(backend, config, num_tokens, [0])
    assert trt.runs and not set(trt.runs) & {context for each in contexts.values() for context in each}


def test_a_second_capture_of_a_size_makes_no_further_context(
    trt: FakeTensorRT, segments: TensorRTSegments, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = TensorRTBackend(segments)
    sizes = (4, 3, 16)
    contexts = {size: capture(trt, monkeypatch, backend, config, size) for size in sizes}
    num_created = trt.num_contexts
    assert {size: capture(trt, monkeypatch, backend, config, size) for size in sizes} == contexts
    assert trt.num_contexts - num_created <= 5  # for uncaptured runs: first and middle in two profiles, last in one


def test_a_size_must_run_before_it_is_captured(
    trt: FakeTensorRT, segments: TensorRTSegments, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = TensorRTBackend(segments)
    run_once(backend, config, 4, [0])
    monkeypatch.setattr(engine_segments, "is_capturing", lambda: True)
    with pytest.raises(AssertionError, match=r"sizes \(3,\) did not run before their capture"):
        run_once(backend, config, 3, [0])


@pytest.mark.parametrize("call", ["set_input_shape", "set_tensor_address", "execute_async_v3"])
def test_what_tensorrt_refuses_is_an_error_that_names_segment_and_size(
    call: str, trt: FakeTensorRT, segments: TensorRTSegments, config: ModelConfig
) -> None:
    trt.fail = call
    with pytest.raises(TwostrokeError, match=r"segment first for sizes \(5,\)"):
        run_once(TensorRTBackend(segments), config, 5, [4])
    trt.fail = None
    trt.calls.clear()
    run_once(TensorRTBackend(segments), config, 5, [4])
    assert (
        "set_input_shape",
        "first",
        16,
        "embeddings",
        (5, config.hidden_size),
    ) in trt.calls  # nothing is taken for set that failed


def test_a_context_that_cannot_be_made_is_an_error_at_start(
    networks: dict[str, bytes], weights: ModelWeights, config: ModelConfig, tmp_path: Path
) -> None:
    trt = make_tensorrt("10.0.1")
    plans = build(trt, networks, tmp_path)
    trt.fail = "create_execution_context"
    with pytest.raises(ConfigError, match=r"no context for first 1-4@2 \(first-\w+\.plan\): out of memory"):
        TensorRTSegments(TensorRT(trt), plans, weights, config, LIMITS, lambda: STREAM)


def test_an_address_that_is_not_aligned_is_refused(
    segments: TensorRTSegments, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = torch.empty(3 * config.qkv_size + 1)
    with pytest.raises(AssertionError, match="qkv is not aligned"):
        segments.first(torch.tensor([1, 2, 3]), memory[1:].view(3, -1))


def test_plans_of_another_model_version_or_gpu_are_refused(
    networks: dict[str, bytes], weights: ModelWeights, config: ModelConfig, tmp_path: Path
) -> None:
    plans = build(make_tensorrt("10.0.1"), networks, tmp_path)

    def load(trt: FakeTensorRT, config: ModelConfig, plans: EnginePlans) -> None:
        TensorRTSegments(TensorRT(trt), plans, weights, config, LIMITS, lambda: STREAM)

    with pytest.raises(
        ConfigError, match=r"plan of first 1-4@2 \(first-\w+\.plan\): the engine plan .* of another version: 10\.0\.1"
    ):
        load(make_tensorrt("10.3.0"), config, plans)
    with pytest.raises(ConfigError, match=r"of another gpu: GPU A, not GPU B"):
        load(make_tensorrt("10.0.1", gpu="GPU B"), config, plans)
    with pytest.raises(ConfigError, match=r"plan of first 5-16@8 \(first-\w+\.plan\): magic tag"):
        whole, damaged, *others = plans["first"]
        damaged = replace(damaged, plan=damaged.plan[9:])
        load(make_tensorrt("10.0.1"), config, {**plans, "first": [whole, damaged, *others]})
    tensors = tensors_by_name(weights.head)
    tensors["lm_head"] = tensors["lm_head"][:100].contiguous()
    smaller = replace(weights, head=with_tensors(weights.head, tensors))
    with pytest.raises(ConfigError, match=r"of another model: lm_head is .*100, 64.*, not .*160, 64"):
        TensorRTSegments(
            TensorRT(make_tensorrt("10.0.1")), plans, smaller, config, LIMITS, lambda: STREAM
        )


def test_steps_in_turn_do_not_disturb_each_other(segments: TensorRTSegments, config: ModelConfig) -> None:
    """No residual is kept: two steps under way, segment by segment, give what each gives alone."""
    inputs = [([5, 6, 7], [2, 0]), ([8], [0])]
    expected = [run_step(segments, config, torch.float32, *each) for each in inputs]
    steps = [Step(segments, config, torch.float32, token_ids) for token_ids, _ in inputs]
    for step in steps:
        step.begin()
    for layer in range(config.num_layers - 1):
        for step in reversed(steps):
            step.middle(layer)
    assert all(
        torch.equal(step.logits(rows), alone)
        for step, (_, rows), alone in zip(steps, inputs, expected, strict=True)
    )


def test_a_step_beyond_the_profiles_in_use_is_refused_before_it_runs(segments: TensorRTSegments) -> None:
    backend = TensorRTBackend(segments)
    backend.begin_step(StepPlan(1), LIMITS.num_tokens)
    with pytest.raises(AssertionError, match="17 tokens need profile 2 of 2 in use"):
        backend.begin_step(StepPlan(2), LIMITS.num_tokens + 1)


class InPlaceBackend(TorchBackend):
    """Overwrites the residual that it is given, as CudaBackend does."""

    def middle(
        self, layer: int, attn_out: torch.Tensor, residual: torch.Tensor, qkv_out: torch.Tensor
    ) -> torch.Tensor:
        return residual.copy_(super().middle(layer, attn_out, residual, qkv_out))


@pytest.mark.parametrize("faster", [(), ("first",), ("middle",), ("last",), ("first", "last")])
def test_tensorrt_and_torch_take_turns_within_a_step(
    faster: tuple[str, ...],
    trt: FakeTensorRT,
    segments: TensorRTSegments,
    weights: ModelWeights,
    config: ModelConfig,
) -> None:
    """`faster`: the segments that torch was measured to run faster, for up to 6 tokens."""
    measured = {
        segment: {6: {"tensorrt": 10.0, "torch": 9.0 if segment in faster else 11.0}}
        for segment in ("first", "middle", "last")
    }
    backend = TensorRTBackend(segments, InPlaceBackend(weights), measured)
    trt.calls.clear()
    found = run_once(backend, config, 6, [5, 0])
    torch.testing.assert_close(
        found, run_once(TorchBackend(weights), config, 6, [5, 0]), rtol=0, atol=1e-5
    )
    assert {call[1] for call in trt.named("execute_async_v3")} == {"first", "middle", "last"} - set(faster)
