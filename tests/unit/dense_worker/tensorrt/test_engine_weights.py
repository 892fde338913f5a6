"""`dense.engine_weights`: which plans the worker runs, what it measures for that, and what it logs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import torch

from services.common.config import DenseSection, ModelSection
from services.common.model_config import load_model_config
from services.common.resolve import ResolvedModel
from services.dense_worker.backends import select
from services.dense_worker.backends.select import PreparedBackend, prepare_backend
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.model.weights import load_weights
from services.dense_worker.tensorrt import engine_segments, measure
from services.dense_worker.tensorrt.api import TensorRT
from services.dense_worker.tensorrt.engine_weights import time_ratio
from services.dense_worker.tensorrt.gpu import Gpu
from services.dense_worker.tensorrt.profiles import Limits
from tests.support.dense.steps import run_step
from tests.support.models import make_model_dir
from tests.support.workers.fake_tensorrt import FakeTensorRT, make_tensorrt

torch.set_num_threads(1)
CPU = torch.device("cpu")
LIMITS = Limits(num_tokens=8, num_rows=4)
TORCH_US, INPUTS_US = 20.0, 10.0


class Machine:
    """A GPU with the stand-in TensorRT, on which an engine with constants takes `constants_us`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, plan_dir: Path, constants_us: float) -> None:
        self.trt: FakeTensorRT = make_tensorrt("8.6.0")
        self.constants_us, self.plan_dir = constants_us, plan_dir
        self.source = ModelSection(path=path)
        self.model = ResolvedModel(load_model_config(path), torch.float32, CPU, 64)
        self.num_timed = 0
        monkeypatch.setattr(select, "current_gpu", lambda device: Gpu("NVIDIA H200", (9, 0), 132))
        monkeypatch.setattr(select, "load_tensorrt", lambda: TensorRT(self.trt))
        for module in (select, measure):
            monkeypatch.setattr(module, "current_stream", lambda: 7)
            monkeypatch.setattr(module, "synchronize", lambda: None)
            monkeypatch.setattr(module, "time_on_gpu", self.time)
        monkeypatch.setattr(engine_segments, "ALIGNMENT_BYTES", 64)

    def time(self, call: Any) -> float:
        self.num_timed += 1
        self.trt.calls.clear()
        call()
        if not self.trt.named("execute_async_v3"):
            return TORCH_US
        is_bound = any("weight" in call[3] or "lm_head" in call[3] for call in self.trt.named("set_tensor_address"))
        return INPUTS_US if is_bound else self.constants_us

    def prepare(self, **section: Any) -> PreparedBackend:
        dense = DenseSection(plan_dir=self.plan_dir, profiles="1-4,5-16", **{"backend": "tensorrt", **section})
        return prepare_backend(dense, self.source, self.model, LIMITS, lambda line: None)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("llama"), "llama")


def kind(prepared: PreparedBackend) -> str:
    [weights] = {cached.record.key.weights for plans in prepared.tensorrt.plans.values() for cached in plans}
    return weights


@pytest.mark.parametrize(
    ("setting", "constants_us", "expected"),
    [
        ("inputs", 1.0, "inputs"),
        ("constants", 99.0, "constants"),
        ("auto", 9.6, "constants"),
        ("auto", 9.8, "inputs"),  # 2 % are not worth a second copy of the weights
        ("auto", 11.0, "inputs"),
    ],
)
def test_the_setting_or_a_measurement_decides(
    monkeypatch: pytest.MonkeyPatch, model_dir: Path, tmp_path: Path, setting: str, constants_us: float, expected: str
) -> None:
    machine = Machine(monkeypatch, model_dir, tmp_path, constants_us)
    prepared = machine.prepare(engine_weights=setting)
    assert kind(prepared) == expected
    weights = load_weights(model_dir, machine.model.config, torch.float32, CPU)
    with structlog.testing.capture_logs() as logs:
        backend = prepared.load(weights).backend
    [loaded] = [entry for entry in logs if entry["event"] == "TensorRT engines loaded"]
    assert loaded["weights"] == expected and loaded["seconds"] >= 0 and "device_bytes" in loaded
    found = run_step(backend, machine.model.config, torch.float32, [5, 6, 7], [2, 0])
    expected_logits = run_step(TorchBackend(weights), machine.model.config, torch.float32, [5, 6, 7], [2, 0])
    torch.testing.assert_close(found, expected_logits, rtol=0, atol=1e-5)


def test_auto_measures_once_and_logs_its_choice(
    monkeypatch: pytest.MonkeyPatch, model_dir: Path, tmp_path: Path
) -> None:
    machine = Machine(monkeypatch, model_dir, tmp_path, 5.0)
    with structlog.testing.capture_logs() as logs:
        machine.prepare(engine_weights="auto")
    [chosen] = [entry for entry in logs if entry["event"] == "engine weights chosen"]
    assert (chosen["weights"], chosen["time_ratio"]) == ("constants", 0.5)
    constants = [path for path in tmp_path.glob("*.plan") if b'"constants": {}' not in path.read_bytes()]
    assert chosen["plan_bytes"] == sum(path.stat().st_size for path in constants) > 0
    num_timed = machine.num_timed
    assert num_timed > 0
    again = machine.prepare(engine_weights="auto")
    assert kind(again) == "constants" and machine.num_timed == num_timed
    machine.trt.calls.clear()
    assert kind(machine.prepare(engine_weights="auto", build="never")) == "constants"
    assert not machine.trt.named("build_serialized_network")


def test_auto_that_may_not_measure_takes_inputs_and_says_so(
    monkeypatch: pytest.MonkeyPatch, model_dir: Path, tmp_path: Path
) -> None:
    machine = Machine(monkeypatch, model_dir, tmp_path, 1.0)
    for setting in ("inputs", "constants"):  # builds; the backend "tensorrt" measures nothing
        machine.prepare(engine_weights=setting)
    with structlog.testing.capture_logs() as logs:
        prepared = machine.prepare(engine_weights="auto", build="never")
    assert kind(prepared) == "inputs" and machine.num_timed == 0
    assert ["not measured" in entry["reason"] for entry in logs if "reason" in entry] == [True]


def test_other_weights_and_a_deeper_model_need_no_build(
    monkeypatch: pytest.MonkeyPatch, model_dir: Path, tmp_path: Path
) -> None:
    machine = Machine(monkeypatch, model_dir, tmp_path, 1.0)
    machine.prepare(engine_weights="constants")
    machine.trt.calls.clear()
    config = machine.model.config
    deeper = replace(config, num_layers=7, sliding_windows=(None,) * 7)
    machine.model = replace(machine.model, config=deeper)
    assert kind(machine.prepare(engine_weights="constants")) == "constants"
    assert not machine.trt.named("build_serialized_network")


def test_the_ratio_is_the_geometric_mean_over_decode_sizes_of_the_repeated_segment() -> None:
    def times(*us: float) -> dict[str, dict[int, dict[str, float]]]:
        sizes = zip((1, 16, 4096), us, strict=True)
        return {"middle": {size: {"tensorrt": each} for size, each in sizes}, "last": {1: {"tensorrt": 1.0}}}

    assert time_ratio(times(50.0, 200.0, 999.0), times(100.0, 100.0, 1.0)) == pytest.approx(1.0)
    assert time_ratio(times(81.0, 100.0, 999.0), times(100.0, 100.0, 1.0)) == pytest.approx(0.9)
    single = {"first": {1: {"tensorrt": 1.0}}, "last": {1: {"tensorrt": 6.0}}}
    assert time_ratio(single, {"first": {1: {"tensorrt": 9.0}}, "last": {1: {"tensorrt": 3.0}}}) == pytest.approx(2.0)
