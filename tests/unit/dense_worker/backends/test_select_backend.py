"""Which backend the worker takes: by config, machine and measurement; and what it says when it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import torch

from services.common.config import DenseSection
from services.common.errors import ConfigError
from services.common.model_config import load_model_config
from services.common.resolve import ResolvedModel
from services.dense_worker.backends import select
from services.dense_worker.backends.select import SelectedBackend, select_backend
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.weights import load_weights
from services.dense_worker.tensorrt import engine_segments, measure
from services.dense_worker.tensorrt.api import TensorRT
from services.dense_worker.tensorrt.backend import TensorRTBackend
from services.dense_worker.tensorrt.gpu import Gpu
from services.dense_worker.tensorrt.profiles import Limits
from tests.support.models import make_model_dir
from tests.support.workers.fake_tensorrt import FakeTensorRT, make_tensorrt

torch.set_num_threads(1)
CPU = torch.device("cpu")
LIMITS = Limits(num_tokens=8, num_rows=4)


class Machine:
    """A machine with a GPU and the stand-in TensorRT, on which every TensorRT call takes `tensorrt_us`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, plan_dir: Path) -> None:
        self.path, self.plan_dir = path, plan_dir
        self.config = load_model_config(path)
        self.weights: ModelWeights = load_weights(path, self.config, torch.float32, CPU)
        self.trt: FakeTensorRT | None = make_tensorrt("10.0.1")
        self.gpu: Gpu | None = Gpu("NVIDIA H200", (9, 0), 132)
        self.num_timed = 0
        monkeypatch.setattr(select, "current_gpu", lambda device: self.gpu)
        monkeypatch.setattr(select, "load_tensorrt", self.load)
        monkeypatch.setattr(select, "current_stream", lambda: 7)
        monkeypatch.setattr(select, "synchronize", lambda: None)
        monkeypatch.setattr(select, "time_on_gpu", self.time)
        monkeypatch.setattr(engine_segments, "ALIGNMENT_BYTES", 64)

    def load(self) -> TensorRT:
        if self.trt is None:
            raise ConfigError("TensorRT is not installed")
        return TensorRT(self.trt)

    def time(self, call: Any) -> float:
        """TensorRT is faster for `first`, torch for the rest."""
        self.num_timed += 1
        num_calls = len(self.trt.calls)
        call()
        by_tensorrt = [name for name, *_ in self.trt.calls[num_calls:]]
        segment = self.trt.calls[-1][1] if by_tensorrt else ""
        return {"": 20.0, "first": 10.0}.get(segment, 30.0)

    def select(
        self, dtype: torch.dtype = torch.float32, limits: Limits = LIMITS, **section: Any
    ) -> SelectedBackend:
        model = ResolvedModel(self.config, dtype, CPU, 64)
        dense = DenseSection(plan_dir=self.plan_dir, **{"profiles": "1-4,5-16", **section})
        return select_backend(dense, model, self.weights, self.path, limits)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, model_dir: Path, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, model_dir, tmp_path / "plans")


def segments_run(machine: Machine, selected: SelectedBackend, num_tokens: int) -> list[str]:
    """Which segments of one step TensorRT ran."""
    assert isinstance(selected.backend, TensorRTBackend)
    config, backend = machine.config, selected.backend
    machine.trt.calls.clear()
    qkv, attn_out = torch.empty(num_tokens, config.qkv_size), torch.zeros(num_tokens, config.attn_size)
    residual = backend.first(torch.zeros(num_tokens, dtype=torch.int64), qkv)
    residual = backend.middle(0, attn_out, residual, qkv)
    backend.last(attn_out, residual, torch.tensor([0]))
    return [segment for _, segment, *_ in machine.trt.named("execute_async_v3")]


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_without_a_gpu_it_is_torch_and_the_log_says_why(machine: Machine, backend: str) -> None:
    machine.gpu = None
    with structlog.testing.capture_logs() as logs:
        selected = machine.select(backend=backend)
    assert selected.name == "torch" and isinstance(selected.backend, TorchBackend)
    reasons = [entry["reason"] for entry in logs]
    if backend == "torch":
        assert reasons == []
    else:
        assert len(reasons) == 1 and "TensorRT runs on a CUDA device" in reasons[0]


def test_auto_without_tensorrt_is_torch_and_the_log_says_why(machine: Machine) -> None:
    machine.trt = None
    with structlog.testing.capture_logs() as logs:
        assert machine.select(backend="auto").name == "torch"
    assert "TensorRT is not installed" in logs[0]["reason"]


def test_tensorrt_asked_for_and_not_there_names_what_is_missing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.trt = None
    with pytest.raises(ConfigError, match=r"dense\.backend is 'tensorrt', but TensorRT is not installed"):
        machine.select(backend="tensorrt")
    machine.gpu = None
    monkeypatch.setattr(select, "is_installed", lambda: False)
    with pytest.raises(
        ConfigError, match=r"runs on a CUDA device.*'cpu'; TensorRT is not installed: `pip install"
    ):
        machine.select(backend="tensorrt")


def test_rtx_on_an_h200_and_bfloat16_on_8_6_are_refused_in_words(machine: Machine) -> None:
    machine.trt = make_tensorrt("1.7.1", is_rtx=True)
    with pytest.raises(
        ConfigError, match=r"does not support NVIDIA H200, compute capability 9\.0 \(supported: 7\.5, 8\.0"
    ):
        machine.select(backend="tensorrt")
    assert machine.select(backend="auto").name == "torch"
    machine.trt = make_tensorrt("8.6.0")
    with pytest.raises(ConfigError, match=r"TensorRT 8\.6\.0 has no bfloat16: use float16"):
        machine.select(torch.bfloat16, backend="tensorrt")


def test_tensorrt_runs_every_segment_and_measures_nothing(machine: Machine) -> None:
    selected = machine.select(backend="tensorrt")
    assert selected.name == "TensorRT 10.0.1"
    assert segments_run(machine, selected, 3) == ["first", "middle", "last"]
    assert machine.num_timed == 0


def test_auto_runs_by_tensorrt_what_was_measured_faster(machine: Machine) -> None:
    assert segments_run(machine, machine.select(backend="auto"), 3) == ["first"]


def test_choice_is_stored_with_the_plans_and_measured_once(machine: Machine) -> None:
    machine.select(backend="auto")
    # first, middle and last at 1, 2, 4, 8 tokens (last: 1, 2, 4), each by two
    assert machine.num_timed == 2 * (4 + 4 + 3)
    selected = machine.select(backend="auto")
    assert machine.num_timed == 2 * (4 + 4 + 3)
    assert segments_run(machine, selected, 3) == ["first"]
    machine.select(backend="auto", limits=Limits(num_tokens=16, num_rows=4))
    assert machine.num_timed > 2 * (4 + 4 + 3)


def test_another_torch_is_measured_again(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.select(backend="auto")
    num_timed = machine.num_timed
    monkeypatch.setattr(measure.torch, "__version__", "9.9")
    machine.select(backend="auto")
    assert machine.num_timed == 2 * num_timed


def test_second_start_builds_nothing(machine: Machine) -> None:
    machine.select(backend="tensorrt")
    assert len(machine.trt.named("build_serialized_network")) == 3
    machine.select(backend="tensorrt")
    assert len(machine.trt.named("build_serialized_network")) == 3


def test_build_never_refuses_missing_plans_and_takes_those_there(machine: Machine) -> None:
    with pytest.raises(
        ConfigError, match=r"no plan for the segment first \(no plan yet\).*build --model .*llama"
    ):
        machine.select(backend="tensorrt", build="never")
    assert not machine.trt.named("build_serialized_network")
    machine.select(backend="tensorrt")
    assert machine.select(backend="auto", build="never").name == "TensorRT 10.0.1"
    assert machine.num_timed == 0
    machine.gpu = Gpu("NVIDIA H100", (9, 0), 132)
    with pytest.raises(ConfigError, match="gpu NVIDIA H100 instead of NVIDIA H200"):
        machine.select(backend="tensorrt", build="never")


def test_profiles_must_reach_the_schedulers_limits(machine: Machine) -> None:
    with pytest.raises(
        ConfigError, match=r"max_num_batched_tokens is 17, dense.profiles .* end at 16: add .* 17-17"
    ):
        machine.select(backend="tensorrt", limits=Limits(17, 4))
    with pytest.raises(ConfigError, match="max_num_seqs is 99"):
        machine.select(backend="tensorrt", limits=Limits(16, 99))
    assert not machine.plan_dir.exists()
