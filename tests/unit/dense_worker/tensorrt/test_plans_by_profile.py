"""A plan for each profile: what is built, loaded, run and measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from services.common.model_config import ModelConfig, load_model_config
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.weights import load_weights
from services.dense_worker.tensorrt import engine_segments
from services.dense_worker.tensorrt.api import TensorRT
from services.dense_worker.tensorrt.backend import Measurements
from services.dense_worker.tensorrt.engine_plan_builder import EnginePlanBuilder
from services.dense_worker.tensorrt.engine_plan_cache import EnginePlanCache, EnginePlans
from services.dense_worker.tensorrt.engine_segments import TensorRTSegments
from services.dense_worker.tensorrt.gpu import Gpu
from services.dense_worker.tensorrt.measure import known_measurements, measure_segments, store_measurements
from services.dense_worker.tensorrt.onnx_segments import export_networks
from services.dense_worker.tensorrt.profiles import Limits, parse_profiles
from tests.support.dense.steps import run_step
from tests.support.models import make_model_dir
from tests.support.workers.fake_tensorrt import FakeTensorRT, make_tensorrt

torch.set_num_threads(1)
CPU = torch.device("cpu")
GPU = Gpu("NVIDIA H200", (9, 0), 132)
SEGMENTS = ("first", "middle", "last")


class Builds:
    """Plans of one model in one directory, and the lines of the last build."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.trt: FakeTensorRT = make_tensorrt("8.6.0")
        self.cache = EnginePlanCache(directory)
        self.config: ModelConfig = load_model_config(model)
        self.weights: ModelWeights = load_weights(model, self.config, torch.float32, CPU)
        self.lines: list[str] = []

    def build(self, profiles: str, limits: Limits | None = None) -> EnginePlans:
        self.lines.clear()
        builder = EnginePlanBuilder(TensorRT(self.trt), GPU, parse_profiles(profiles), self.cache, limits)
        return builder.find_or_build(
            export_networks(self.config, torch.float32), torch.float32, None, self.lines.append
        )

    @property
    def building(self) -> list[str]:
        return [line for line in self.lines if ": building" in line]

    @property
    def built(self) -> list[str]:
        """Segment and profiles of each plan that was built."""
        return [line.split("] ")[1].split(":")[0] for line in self.building]

    def load(self, plans: EnginePlans, limits: Limits) -> TensorRTSegments:
        self.trt.calls.clear()
        return TensorRTSegments(TensorRT(self.trt), plans, self.weights, self.config, limits, lambda: 7)

    def measure(self, plans: EnginePlans, limits: Limits) -> Measurements:
        """By a clock that stands still."""
        backends = {"torch": TorchBackend(self.weights)}
        measured = measure_segments(backends, self.config, torch.float32, CPU, limits, lambda call: 1.0)
        store_measurements(self.cache, plans, measured)
        return measured


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def builds(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builds:
    monkeypatch.setattr(engine_segments, "ALIGNMENT_BYTES", 64)  # torch's on a CPU; on a GPU it is 512
    return Builds(model_dir, tmp_path / "plans")


def test_each_profile_has_a_plan_whose_sizes_are_its_own(builds: Builds) -> None:
    plans = builds.build("1-1,2-16@16")
    titles = [f"{segment} {profile}" for segment in SEGMENTS for profile in ("1-1@1", "2-16@16")]
    assert [line.split(":")[0] for line in builds.building] == [f"[{i}/6] {title}" for i, title in enumerate(titles, 1)]
    for segment, of_segment in plans.items():
        sizes = [json.loads(cached.plan.partition(b"\0")[0])["profiles"] for cached in of_segment]
        of_one, of_more = (
            {name: [low[0], best[0], high[0]] for name, (low, best, high) in each.items()} for [each] in sizes
        )
        assert [*of_one] == [*of_more] == (["embeddings"] if segment == "first" else ["attn_out", "residual"])
        assert set(map(tuple, of_one.values())) == {(1, 1, 1)}
        assert set(map(tuple, of_more.values())) == {(2, 16, 16)}


def test_a_changed_list_of_profiles_builds_only_the_new_ones(builds: Builds) -> None:
    builds.build("1-1,2-16,17-64")
    builds.build("1-1,2-8,9-16,17-64")
    assert builds.built == [f"{segment} {new}" for segment in SEGMENTS for new in ("2-8@4", "9-16@16")]
    assert all("building, no plan yet" in line for line in builds.building)


def test_each_plan_that_the_limits_reach_is_loaded_once_and_no_other(builds: Builds) -> None:
    segments = builds.load(builds.build("1-4,5-16,17-64"), Limits(num_tokens=16, num_rows=4))
    in_use = [("first", [4]), ("first", [16]), ("middle", [4]), ("middle", [16]), ("last", [4])]
    assert [call[1:] for call in builds.trt.named("deserialize_cuda_engine")] == in_use
    run_step(segments, builds.config, torch.float32, list(range(16)), [0, 1])
    assert len(builds.trt.named("deserialize_cuda_engine")) == len(in_use)


def test_a_worker_builds_the_plans_that_its_limits_reach_and_another_worker_the_rest(builds: Builds) -> None:
    limits, further = Limits(num_tokens=16, num_rows=4), Limits(num_tokens=16, num_rows=5)
    segments = builds.load(builds.build("1-4,5-16,17-64", limits), limits)
    assert builds.built == ["first 1-4@2", "first 5-16@8", "middle 1-4@2", "middle 5-16@8", "last 1-4@2"]
    inputs = (builds.config, torch.float32, list(range(16)), [0, 15])
    torch.testing.assert_close(
        run_step(segments, *inputs), run_step(TorchBackend(builds.weights), *inputs), rtol=0, atol=1e-5
    )
    builds.load(builds.build("1-4,5-16,17-64", further), further)
    assert builds.built == ["last 5-16@8"]
    builds.build("1-4,5-16,17-64")
    assert builds.built == ["first 17-64@32", "middle 17-64@32", "last 17-64@32"]


def test_more_rows_than_tokens_need_plans_of_last_alone(builds: Builds) -> None:
    limits = Limits(num_tokens=4, num_rows=16)
    builds.load(builds.build("1-4,5-16,17-64", limits), limits)
    assert builds.built == ["first 1-4@2", "middle 1-4@2", "last 1-4@2", "last 5-16@8"]


def test_each_size_runs_by_the_engine_of_its_profile(builds: Builds) -> None:
    plans = builds.build("1-4,5-16,17-64")
    segments, by_torch = builds.load(plans, Limits(64, 64)), TorchBackend(builds.weights)
    for num_tokens, num_rows, high_tokens, high_rows in [(1, 1, 4, 4), (4, 4, 4, 4), (5, 2, 16, 4), (17, 5, 64, 16)]:
        builds.trt.calls.clear()
        inputs = (builds.config, torch.float32, list(range(num_tokens)), list(range(num_rows)))
        torch.testing.assert_close(run_step(segments, *inputs), run_step(by_torch, *inputs), rtol=0, atol=1e-5)
        middles = [("middle", high_tokens)] * (builds.config.num_layers - 1)
        expected = [("first", high_tokens), *middles, ("last", high_rows)]
        assert [call[1:3] for call in builds.trt.named("execute_async_v3")] == expected


def test_sizes_below_a_single_one_run_padded_by_its_plan(builds: Builds) -> None:
    """Here by copies, as no rows follow in the memory of `run_step`'s tensors."""
    plans = builds.build("1,8,16", Limits(16, 6))
    assert builds.built[-2:] == ["last 1-1@1", "last 8-8@8"]
    segments, by_torch = builds.load(plans, Limits(16, 6)), TorchBackend(builds.weights)
    cases = [(1, 1, 1, 1), (2, 2, 8, 8), (7, 6, 8, 8), (8, 1, 8, 1), (9, 3, 16, 8)]
    for num_tokens, num_rows, run_tokens, run_rows in cases:
        builds.trt.calls.clear()
        inputs = (builds.config, torch.float32, list(range(num_tokens)), list(range(num_rows)))
        torch.testing.assert_close(run_step(segments, *inputs), run_step(by_torch, *inputs), rtol=0, atol=1e-5)
        middles = [("middle", run_tokens)] * (builds.config.num_layers - 1)
        expected = [("first", run_tokens), *middles, ("last", run_rows)]
        assert [call[1:3] for call in builds.trt.named("execute_async_v3")] == expected


def test_a_padded_run_writes_the_rows_of_a_step_whatever_lies_behind_them(builds: Builds) -> None:
    """In the memory of both workers more rows follow: none is copied, and those in front keep what they have."""
    segments, by_torch = builds.load(builds.build("8"), Limits(8, 8)), TorchBackend(builds.weights)
    token_ids, size = torch.arange(5), builds.config.qkv_size
    memory = torch.full((12, size), torch.nan)
    expected = torch.empty(5, size)
    residual, of_torch = segments.first(token_ids, memory[3:8]), by_torch.first(token_ids, expected)
    torch.testing.assert_close(memory[3:8], expected, rtol=0, atol=1e-5)
    attn_memory = torch.full((12, builds.config.attn_size), torch.nan)
    attn_memory[4:9] = torch.randn(5, builds.config.attn_size, generator=torch.Generator().manual_seed(1))
    residual = segments.middle(0, attn_memory[4:9], residual, memory[3:8])
    of_torch = by_torch.middle(0, attn_memory[4:9], of_torch, expected)
    torch.testing.assert_close(memory[3:8], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(residual, of_torch, rtol=0, atol=1e-5)
    assert memory[:3].isnan().all() and memory[11:].isnan().all()


def test_each_record_keeps_the_sizes_that_its_plan_ran(builds: Builds) -> None:
    builds.measure(builds.build("1-4,5-16"), Limits(num_tokens=8, num_rows=4))
    sizes = {each.key.title: [int(size) for size in each.measured_us or ()] for each in builds.cache.records()}
    assert sizes == {
        **{"first 1-4@2": [1, 2, 4], "first 5-16@8": [8]},
        **{"middle 1-4@2": [1, 2, 4], "middle 5-16@8": [8]},
        **{"last 1-4@2": [1, 2, 4], "last 5-16@8": []},
    }


def test_a_plan_for_a_single_size_keeps_what_smaller_sizes_took(builds: Builds) -> None:
    limits = Limits(num_tokens=8, num_rows=4)
    measured = builds.measure(builds.build("1,8,16"), limits)
    sizes = {each.key.title: [int(size) for size in each.measured_us or ()] for each in builds.cache.records()}
    assert sizes["middle 1-1@1"] == [1] and sizes["middle 8-8@8"] == [2, 4, 8]
    assert sizes["last 8-8@8"] == [2, 4] and not sizes["middle 16-16@16"]
    assert known_measurements(builds.build("1,8,16"), limits) == measured


def test_measurements_are_known_if_each_plan_in_use_has_them(builds: Builds) -> None:
    """A plan beyond the limits needs none; a new plan has none; those of a shared plan stay."""
    few, all_of_them = Limits(num_tokens=4, num_rows=4), Limits(num_tokens=16, num_rows=4)
    assert known_measurements(builds.build("1-4,5-16"), few) is None
    measured = builds.measure(builds.build("1-4,5-16"), few)
    assert known_measurements(builds.build("1-4,5-16"), few) == measured
    assert known_measurements(builds.build("1-4,5-16"), all_of_them) is None
    measured = builds.measure(builds.build("1-4,5-16"), all_of_them)
    assert known_measurements(builds.build("1-4,5-16"), all_of_them) == measured
    changed = builds.build("1-4,5-8,9-16")
    assert known_measurements(changed, all_of_them) is None and known_measurements(changed, few) is not None
    builds.measure(changed, all_of_them)
    for profiles in ("1-4,5-8,9-16", "1-4,5-16"):
        assert known_measurements(builds.build(profiles), all_of_them) == measured
