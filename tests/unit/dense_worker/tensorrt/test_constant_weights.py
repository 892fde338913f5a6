"""Plans whose weights are constants: built without weights, given each layer's after loading, same results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import tensorrt_rtx_bindings
import torch
from transformers import AutoModelForCausalLM

from services.common.errors import ConfigError
from services.common.model_config import ModelConfig, load_model_config
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.weights import load_weights, random_weights
from services.dense_worker.tensorrt import engine_contexts, engine_segments
from services.dense_worker.tensorrt.api import TensorRT
from services.dense_worker.tensorrt.backend import TensorRTBackend
from services.dense_worker.tensorrt.constant_weights import make_constants
from services.dense_worker.tensorrt.engine_plan_builder import EnginePlanBuilder
from services.dense_worker.tensorrt.engine_plan_cache import EnginePlanCache, EnginePlans
from services.dense_worker.tensorrt.engine_segments import TensorRTSegments
from services.dense_worker.tensorrt.export_check import OneSequenceAttention, greedy
from services.dense_worker.tensorrt.gpu import Gpu
from services.dense_worker.tensorrt.onnx_segments import export_networks, layout_weights
from services.dense_worker.tensorrt.profiles import Limits, parse_profiles
from tests.support.dense.steps import run_step
from tests.support.models import make_model_dir
from tests.support.workers.fake_tensorrt import FakeTensorRT, make_tensorrt

torch.set_num_threads(1)
CPU = torch.device("cpu")
PROFILES = parse_profiles("1-4,5-16")
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


def build(trt: FakeTensorRT, config: ModelConfig, directory: Path, *, has_constants: bool = True) -> EnginePlans:
    cache = EnginePlanCache(directory)
    builder = EnginePlanBuilder(TensorRT(trt), GPU, PROFILES, cache, has_constants=has_constants)
    return builder.find_or_build(export_networks(config, torch.float32), torch.float32, None, lambda line: None)


def load(trt: FakeTensorRT, plans: EnginePlans, weights: ModelWeights, config: ModelConfig) -> TensorRTSegments:
    return TensorRTSegments(TensorRT(trt), plans, weights, config, LIMITS, lambda: 7)


@pytest.mark.parametrize(("version", "is_rtx"), APIS)
def test_generation_equals_transformers_with_every_api(
    version: str, is_rtx: bool, model_dir: Path, weights: ModelWeights, config: ModelConfig, tmp_path: Path
) -> None:
    trt = make_tensorrt(version, is_rtx=is_rtx)
    segments = load(trt, build(trt, config, tmp_path), weights, config)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    prompt = [3, 14, 15, 92, 65, 35]
    with torch.inference_mode():
        attention = OneSequenceAttention(model, config)
        found = greedy(TensorRTBackend(segments), attention, config, torch.float32, prompt, 8)
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert found == expected[0, len(prompt) :].tolist()


def test_only_activations_and_the_embedding_are_given_by_address(
    weights: ModelWeights, config: ModelConfig, tmp_path: Path
) -> None:
    trt = make_tensorrt("8.6.0")
    segments = load(trt, build(trt, config, tmp_path), weights, config)
    trt.calls.clear()
    run_step(segments, config, torch.float32, [1, 2, 3], [2])
    bound = {(call[1], call[3]) for call in trt.named("set_tensor_address")}
    assert bound == {
        *(("first", name) for name in ("token_ids", "embed", "qkv", "residual_out")),
        *(("middle", name) for name in ("attn_out", "residual", "qkv", "residual_out")),
        *(("last", name) for name in ("attn_out", "residual", "rows", "logits")),
    }


def test_every_layer_gets_its_own_engine_from_one_plan(
    weights: ModelWeights, config: ModelConfig, tmp_path: Path
) -> None:
    trt = make_tensorrt("8.6.0")
    plans = build(trt, config, tmp_path)
    assert len(trt.named("build_serialized_network")) == 3
    load(trt, plans, weights, config)
    refitted = [call[1] for call in trt.named("refit_cuda_engine")]
    assert refitted == ["first", *["middle"] * (config.num_layers - 1), "last"]
    loaded = [call[1:] for call in trt.named("deserialize_cuda_engine")][3:]  # after those of the builder
    assert loaded == [(segment, [4, 16]) for segment in refitted]  # each engine has both profiles


def test_other_weights_of_the_same_shapes_need_no_build(config: ModelConfig, tmp_path: Path) -> None:
    trt = make_tensorrt("8.6.0")
    build(trt, config, tmp_path)
    trt.calls.clear()
    plans = build(trt, config, tmp_path)
    assert not trt.named("build_serialized_network")
    for seed in (1, 2):
        weights = random_weights(config, torch.float32, CPU, seed)
        found = run_step(load(trt, plans, weights, config), config, torch.float32, [5, 6, 7], [2, 0])
        expected = run_step(TorchBackend(weights), config, torch.float32, [5, 6, 7], [2, 0])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_plans_with_constants_and_with_inputs_are_kept_apart(config: ModelConfig, tmp_path: Path) -> None:
    trt = make_tensorrt("8.6.0")
    build(trt, config, tmp_path)
    build(trt, config, tmp_path, has_constants=False)
    num_plans = 3 + 3 * len(PROFILES)  # one with all profiles for each segment, then one for each profile
    assert len(trt.named("build_serialized_network")) == num_plans
    assert len(list(tmp_path.glob("*.plan"))) == num_plans
    assert [call[1] for call in trt.named("set_flag")] == ["REFIT"] * 3
    # The kernels that a build tries: with constants so many at level 5 that an H200 took minutes for a tiny model.
    levels = [call[1] for call in trt.named("builder_optimization_level")]
    assert levels == [3] * 3 + [5] * 3 * len(PROFILES)


def test_bfloat16_constants_are_given_by_address(config: ModelConfig, tmp_path: Path) -> None:
    """numpy has no bfloat16. The stand-in cannot run it, so only what it was given is checked."""
    trt = make_tensorrt("10.0.1")
    cache = EnginePlanCache(tmp_path)
    builder = EnginePlanBuilder(TensorRT(trt), GPU, PROFILES, cache, has_constants=True)
    found = builder.find_or_build(export_networks(config, torch.bfloat16), torch.bfloat16, None, lambda line: None)
    weights = random_weights(config, torch.bfloat16, CPU, 0)
    segments = load(trt, found, weights, config)
    engine = segments._tuned["middle"][0].engines[0]._engine
    expected = dict(weights.named_tensors())["layers.0.o_weight"]
    assert engine.constants["o_weight"].tobytes() == expected.view(torch.int16).numpy().tobytes()


def test_a_plan_of_another_model_is_refused(weights: ModelWeights, config: ModelConfig, tmp_path: Path) -> None:
    trt = make_tensorrt("8.6.0")
    wider = replace(config, intermediate_size=config.intermediate_size * 2)
    with pytest.raises(ConfigError, match=r"no constant gate_up_weight .* that can be set: gate_up_weight has"):
        load(trt, build(trt, wider, tmp_path), weights, config)
    qwen2 = replace(config, qk_norm=False, family="llama")
    with pytest.raises(ConfigError, match="no constant q_norm"):
        load(trt, build(trt, qwen2, tmp_path), weights, config)
    inputs = build(trt, qwen2, tmp_path, has_constants=False)
    with pytest.raises(ConfigError, match="constants cannot be set: the engine was not built with the REFIT flag"):
        load(trt, inputs, weights, config)


def test_uncaptured_runs_enqueue_each_layer_once(
    weights: ModelWeights, config: ModelConfig, tmp_path: Path
) -> None:
    trt = make_tensorrt("8.6.0")
    segments = load(trt, build(trt, config, tmp_path), weights, config)
    for num_tokens in (3, 4):
        trt.calls.clear()
        run_step(segments, config, torch.float32, list(range(num_tokens)), [0])
        assert len(trt.named("execute_async_v3")) == config.num_layers + 1


def test_a_step_can_be_captured_after_the_layers_to_warm_up_ran(
    weights: ModelWeights, config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer has an engine of its own, which needs a run of these sizes before a capture."""
    trt = make_tensorrt("8.6.0")
    plans = build(trt, config, tmp_path)
    expected = run_step(TorchBackend(weights), config, torch.float32, [5, 6, 7], [2, 0])
    uncaptured = run_step(load(trt, plans, weights, config), config, torch.float32, [5, 6, 7], [2, 0])
    torch.testing.assert_close(uncaptured, expected, rtol=0, atol=1e-5)
    segments = load(trt, plans, weights, config)
    qkv, attn_out = torch.empty(3, config.qkv_size), torch.zeros(3, config.attn_size)
    residual = segments.first(torch.tensor([5, 6, 7]), qkv)
    for layer in range(segments.num_layers_to_warm_up):
        residual = segments.middle(layer, attn_out, residual, qkv)
    segments.last(attn_out, residual, torch.tensor([2, 0]))
    monkeypatch.setattr(engine_contexts, "is_capturing", lambda: True)
    trt.calls.clear()
    captured = run_step(segments, config, torch.float32, [5, 6, 7], [2, 0])
    torch.testing.assert_close(captured, expected, rtol=0, atol=1e-5)
    assert not trt.named("set_input_shape")  # which a graph cannot hold


def test_constants_that_tensorrt_refuses_are_an_error(
    weights: ModelWeights, config: ModelConfig, tmp_path: Path
) -> None:
    trt = make_tensorrt("8.6.0")
    plans = build(trt, config, tmp_path)
    trt.fail = "refit_cuda_engine"
    with pytest.raises(ConfigError, match="cannot set the constants of a plan"):
        load(trt, plans, weights, config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_real_tensorrt_rtx_builds_networks_whose_inputs_became_constants(
    dtype: torch.dtype, config: ModelConfig
) -> None:
    """Without the REFIT flag, with which TensorRT-RTX builds only on a machine with a GPU."""
    trt = tensorrt_rtx_bindings
    logger = trt.Logger(trt.Logger.ERROR)
    dtypes = {trt.float32: torch.float32, trt.float16: torch.float16, trt.bfloat16: torch.bfloat16}
    for network in export_networks(config, dtype).values():
        builder = trt.Builder(logger)
        definition = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        assert trt.OnnxParser(definition, logger).parse(network)
        kept = make_constants(trt, definition, layout_weights(onnx.load_from_string(network).graph), dtypes)
        left = [definition.get_input(index) for index in range(definition.num_inputs)]
        assert {tensor.name for tensor in left} <= {"token_ids", "embed", "attn_out", "residual", "rows"}
        profile = builder.create_optimization_profile()
        for tensor in left:
            rest = tuple(tensor.shape)[1:]
            if tensor.name != "embed":
                profile.set_shape(tensor.name, *((size, *rest) for size in (1, 4, 16)))
        builder_config = builder.create_builder_config()
        builder_config.add_optimization_profile(profile)
        assert builder.build_serialized_network(definition, builder_config) is not None
        del kept
