"""Products in halves, in plans for one size: what TensorRT 8.6 is given, and that it computes the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from services.common.model_config import ModelConfig, load_model_config
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.model.weights import load_weights
from services.dense_worker.tensorrt import engine_segments, onnx_forms
from services.dense_worker.tensorrt.api import TensorRT
from services.dense_worker.tensorrt.engine_plan_builder import EnginePlanBuilder
from services.dense_worker.tensorrt.engine_plan_cache import EnginePlanCache, EnginePlans
from services.dense_worker.tensorrt.engine_segments import TensorRTSegments
from services.dense_worker.tensorrt.gpu import Gpu
from services.dense_worker.tensorrt.onnx_segments import export_networks
from services.dense_worker.tensorrt.profiles import Limits, parse_profiles
from tests.support.dense.steps import run_step
from tests.support.models import make_model_dir
from tests.support.workers.fake_tensorrt import make_tensorrt

CPU = torch.device("cpu")
GPU = Gpu("NVIDIA H200", (9, 0), 132)
LONG_SUM, MAX_OUTPUTS = 64, 64  # of the model: hidden 64, intermediate 96


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_segments, "ALIGNMENT_BYTES", 64)  # torch's on a CPU; on a GPU it is 512
    monkeypatch.setattr(onnx_forms, "_LONG_SUM", LONG_SUM)
    monkeypatch.setattr(onnx_forms, "_MAX_OUTPUTS", MAX_OUTPUTS)


def build(model: Path, directory: Path, profiles: str, version: str = "8.6.0") -> tuple[TensorRT, EnginePlans]:
    api, config = TensorRT(make_tensorrt(version)), load_model_config(model)
    builder = EnginePlanBuilder(api, GPU, parse_profiles(profiles), EnginePlanCache(directory))
    networks = export_networks(config, torch.float32)
    return api, builder.find_or_build(networks, torch.float32, None, lambda line: None)


def products_of(plans: EnginePlans, segment: str, index: int) -> dict[str, int]:
    """How many products of each form the plan of a profile has."""
    network = plans[segment][index].plan.partition(b"\0")[2]
    found = Counter(node.op_type for node in onnx.load_from_string(network).graph.node)
    return {name: found[op] for name, op in (("whole", "Gemm"), ("halved", "MatMul"), ("kept", "Identity"))}


def test_plans_for_one_size_compute_what_torch_computes(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path / "model", "llama")
    api, plans = build(path, tmp_path / "plans", "1,4,40")
    config: ModelConfig = load_model_config(path)
    weights = load_weights(path, config, torch.float32, CPU)
    segments = TensorRTSegments(api, plans, weights, config, Limits(40, 40), lambda: 7)
    for num_tokens, rows in ((1, [0]), (4, [3, 0, 1, 2]), (3, [2, 1]), (20, [19])):
        step: Any = (config, torch.float32, list(range(num_tokens)), rows)
        found, expected = run_step(segments, *step), run_step(TorchBackend(weights), *step)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_each_long_product_of_one_row_keeps_its_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_forms, "_LONG_SUM", 63)  # o has long sums, too
    path = make_model_dir(tmp_path / "model", "llama")
    api, plans = build(path, tmp_path / "plans", "1,4")
    assert products_of(plans, "middle", 0) == {"whole": 2, "halved": 0, "kept": 2}
    config: ModelConfig = load_model_config(path)
    weights = load_weights(path, config, torch.float32, CPU)
    segments = TensorRTSegments(api, plans, weights, config, Limits(4, 4), lambda: 7)
    step: Any = (config, torch.float32, [0], [0])
    expected = run_step(TorchBackend(weights), *step)
    torch.testing.assert_close(run_step(segments, *step), expected, rtol=0, atol=1e-5)


def test_short_products_that_are_added_are_halved_up_to_a_number_of_rows(tmp_path: Path) -> None:
    _, plans = build(make_model_dir(tmp_path / "model", "llama"), tmp_path / "plans", "1,4,256,257")
    of_one = {"whole": 3, "halved": 0, "kept": 1}  # down is a sum
    halved, as_exported = {"whole": 2, "halved": 2, "kept": 0}, {"whole": 4, "halved": 0, "kept": 0}  # o and down
    for segment in ("middle", "last"):
        assert [products_of(plans, segment, index) for index in range(4)] == [of_one, halved, halved, as_exported]
    assert [products_of(plans, "first", index)["whole"] for index in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("profiles", "version", "fields"),
    [
        ("1-4,5-8", "8.6.0", {}),
        ("1,4", "10.0.1", {}),
        ("1,4", "8.6.0", {"attention_bias": True, "mlp_bias": True}),
    ],
    ids=["of several sizes", "later TensorRT", "with biases"],
)
def test_other_products_stay_whole(profiles: str, version: str, fields: dict[str, Any], tmp_path: Path) -> None:
    _, plans = build(make_model_dir(tmp_path / "model", "llama", **fields), tmp_path / "plans", profiles, version)
    for index in range(2):
        assert products_of(plans, "middle", index) == {"whole": 4, "halved": 0, "kept": 0}
