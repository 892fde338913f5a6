"""Which backend the worker selects by config, machine and measurement, and the errors if it cannot."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import torch

from services.common.config import Config, DenseSection, ModelSection, SchedulerSection
from services.common.errors import ConfigError, TwostrokeError
from services.common.families.shape import ExpertOptions
from services.common.model_config import load_model_config
from services.common.quantization.schemes import on_the_fly_fp8
from services.common.resolve import ResolvedModel
from services.dense_worker import build as dense_build
from services.dense_worker.backends.select import SelectedBackend, prepare_backend
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.weights import load_weights
from services.dense_worker.tensorrt import build, engine_segments, measure, onnx_segments, prepare
from services.dense_worker.tensorrt.api import TensorRT
from services.dense_worker.tensorrt.backend import TensorRTBackend
from services.dense_worker.tensorrt.gpu import Gpu
from services.dense_worker.tensorrt.profiles import Limits
from tests.support.dense.steps import relative_error, run_step
from tests.support.models import make_model_dir
from tests.support.workers.fake_tensorrt import FakeTensorRT, make_tensorrt

torch.set_num_threads(1)
CPU = torch.device("cpu")
LIMITS = Limits(num_tokens=8, num_rows=4)


class Machine:
    """A machine with a GPU and a simulated TensorRT."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, plan_dir: Path) -> None:
        self.path, self.plan_dir = path, plan_dir
        self.config = load_model_config(path)
        self.weights: ModelWeights = load_weights(path, self.config, torch.float32, CPU)
        self.trt: FakeTensorRT | None = make_tensorrt("10.0.1")
        self.gpu: Gpu | None = Gpu("NVIDIA H200", (9, 0), 132)
        self.num_timed = 0
        self.lines: list[str] = []  # messages about the progress of builds
        monkeypatch.setattr(prepare, "current_gpu", lambda device: self.gpu)
        monkeypatch.setattr(prepare, "load_tensorrt", self.load)
        for module in (prepare, measure):
            monkeypatch.setattr(module, "current_stream", lambda: 7)
            monkeypatch.setattr(module, "synchronize", lambda: None)
            monkeypatch.setattr(module, "time_on_gpu", self.time)
        monkeypatch.setattr(engine_segments, "ALIGNMENT_BYTES", 64)

    def load(self) -> TensorRT:
        if self.trt is None:
            raise ConfigError("TensorRT is not installed")
        return TensorRT(self.trt)

    def time(self, call: Any) -> float:
        """Simulated times: TensorRT is faster for `first`, torch for the other segments."""
        self.num_timed += 1
        num_calls = len(self.trt.calls)
        call()
        by_tensorrt = [name for name, *_ in self.trt.calls[num_calls:]]
        segment = self.trt.calls[-1][1] if by_tensorrt else ""
        return {"": 20.0, "first": 10.0}.get(segment, 30.0)

    def select(
        self,
        dtype: torch.dtype = torch.float32,
        limits: Limits = LIMITS,
        takes_vectors: bool = False,
        **section: Any,
    ) -> SelectedBackend:
        model = ResolvedModel(self.config, dtype, CPU, 64)
        dense = DenseSection(plan_dir=self.plan_dir, **{"profiles": "1-4,5-16", **section})
        source = ModelSection(path=self.path)
        prepared = prepare_backend(dense, source, model, limits, self.lines.append, takes_vectors=takes_vectors)
        return prepared.load(self.weights)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, model_dir: Path, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, model_dir, tmp_path / "plans")


def segments_run(machine: Machine, selected: SelectedBackend, num_tokens: int) -> list[str]:
    """Runs one step; returns the segments that TensorRT ran."""
    assert isinstance(selected.backend, TensorRTBackend)
    config, backend = machine.config, selected.backend
    machine.trt.calls.clear()
    qkv, attn_out = torch.empty(num_tokens, config.qkv_size), torch.zeros(num_tokens, config.attn_size)
    residual = backend.first(torch.zeros(num_tokens, dtype=torch.int64), qkv)
    residual = backend.middle(0, attn_out, residual, qkv)
    backend.last(attn_out, residual, torch.tensor([0]))
    return [segment for _, segment, *_ in machine.trt.named("execute_async_v3")]


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_without_a_gpu_torch_is_selected_and_the_reason_is_logged(machine: Machine, backend: str) -> None:
    machine.gpu = None
    with structlog.testing.capture_logs() as logs:
        selected = machine.select(backend=backend)
    assert selected.name == "torch" and isinstance(selected.backend, TorchBackend)
    reasons = [entry["reason"] for entry in logs]
    if backend == "torch":
        assert reasons == []
    else:
        assert len(reasons) == 1 and "TensorRT runs on a CUDA device" in reasons[0]


def test_auto_without_tensorrt_selects_torch_and_logs_the_reason(machine: Machine) -> None:
    machine.trt = None
    with structlog.testing.capture_logs() as logs:
        assert machine.select(backend="auto").name == "torch"
    assert "TensorRT is not installed" in logs[0]["reason"]


def test_the_error_names_what_tensorrt_is_missing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.trt = None
    with pytest.raises(ConfigError, match=r"dense\.backend is 'tensorrt', but TensorRT is not installed"):
        machine.select(backend="tensorrt")
    machine.gpu = None
    monkeypatch.setattr(prepare, "is_installed", lambda: False)
    with pytest.raises(
        ConfigError, match=r"runs on a CUDA device.*'cpu'; TensorRT is not installed: `pip install"
    ):
        machine.select(backend="tensorrt")


def test_torch_is_beside_tensorrt_where_steps_have_vectors(machine: Machine) -> None:
    selected = machine.select(backend="tensorrt", takes_vectors=True)
    assert selected.backend.takes_input_embeds and machine.num_timed == 0
    assert segments_run(machine, selected, 5) == ["first", "middle", "last"], "torch runs nothing else"
    assert not machine.select(backend="tensorrt").backend.takes_input_embeds


def test_mixtures_of_experts_run_by_torch_beside_tensorrt(machine: Machine) -> None:
    experts = ExpertOptions(4, 2, 16, True, (0,))
    machine.config = replace(machine.config, parts=replace(machine.config.parts, experts=experts))
    with structlog.testing.capture_logs() as logs:
        assert machine.select(backend="auto").name == "torch"
    assert "mixtures of experts ('llama') run only with dense.backend 'torch'" in logs[0]["reason"]
    with pytest.raises(ConfigError, match=r"dense\.backend is 'tensorrt', but mixtures of experts"):
        machine.select(backend="tensorrt")


def test_quantized_weights_run_by_torch_beside_a_tensorrt_without_them(machine: Machine) -> None:
    machine.config = replace(machine.config, quantization=on_the_fly_fp8())
    machine.trt = make_tensorrt("8.6.0")
    with structlog.testing.capture_logs() as logs:
        assert machine.select(backend="auto").name == "torch"
    reason = "TensorRT 8.6.0 is given no quantized weights (float8_e4m3fn): set dense.backend to torch"
    assert reason in logs[0]["reason"]
    with pytest.raises(ConfigError, match=re.escape(reason)):
        machine.select(backend="tensorrt")
    assert not machine.trt.named("build_serialized_network")


def test_quantized_weights_are_inputs_of_the_plans(machine: Machine) -> None:
    machine.config = replace(machine.config, quantization=on_the_fly_fp8())
    machine.weights = load_weights(machine.path, machine.config, torch.float32, CPU)
    selected = machine.select(backend="tensorrt")
    assert segments_run(machine, selected, 3) == ["first", "middle", "last"]
    expected = run_step(TorchBackend(machine.weights), machine.config, torch.float32, [1, 2, 3], [0, 2])
    found = run_step(selected.backend, machine.config, torch.float32, [1, 2, 3], [0, 2])
    assert relative_error(found, expected) < 1e-2  # an input between two codes may become the other one


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


def test_auto_runs_segments_by_the_faster_backend(machine: Machine) -> None:
    assert segments_run(machine, machine.select(backend="auto"), 3) == ["first"]


def test_choice_is_stored_with_the_plans_and_measured_once(machine: Machine) -> None:
    machine.select(backend="auto")
    # first, middle and last with 1, 2, 4, 8 tokens (last: 1, 2, 4), each with both backends
    assert machine.num_timed == 2 * (4 + 4 + 3)
    selected = machine.select(backend="auto")
    assert machine.num_timed == 2 * (4 + 4 + 3)
    assert segments_run(machine, selected, 3) == ["first"]
    machine.select(backend="auto", limits=Limits(num_tokens=16, num_rows=4))
    assert machine.num_timed > 2 * (4 + 4 + 3)


def test_another_version_of_torch_is_measured_again(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.select(backend="auto")
    num_timed = machine.num_timed
    monkeypatch.setattr(measure.torch, "__version__", "9.9")
    machine.select(backend="auto")
    assert machine.num_timed == 2 * num_timed


def test_second_start_builds_nothing(machine: Machine) -> None:
    machine.select(backend="tensorrt")
    assert len(machine.trt.named("build_serialized_network")) == 5  # those that 16 tokens and 4 rows reach
    machine.select(backend="tensorrt")
    assert len(machine.trt.named("build_serialized_network")) == 5


def test_build_never_refuses_missing_plans_and_uses_existing_ones(machine: Machine) -> None:
    with pytest.raises(
        ConfigError, match=r"no plan for the segment first 1-4@2 \(no plan yet\).*build --model .*llama"
    ):
        machine.select(backend="tensorrt", build="never")
    assert machine.lines == []
    assert not machine.trt.named("build_serialized_network")
    machine.select(backend="tensorrt")
    with structlog.testing.capture_logs() as entries:
        assert machine.select(backend="auto", build="never").name == "TensorRT 10.0.1"
    assert machine.num_timed == 0
    [entry] = [entry for entry in entries if entry["event"] == "TensorRT runs every size"]
    assert "have not been measured" in entry["reason"]
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


def refuse_to_write(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("services.dense_worker.tensorrt.files.atomic_file.os.fsync", fsync)


def fail_call(name: str) -> Callable[[Machine, pytest.MonkeyPatch], None]:
    def fail(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        machine.trt.fail = name

    return fail


def have_a_file_for_a_directory(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.plan_dir.write_text("")


def have_no_driver(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.select(backend="tensorrt")  # the plans exist
    machine.trt.has_gpu = False

    def fail() -> None:
        raise ConfigError("CUDA does not work in this process: no driver")

    monkeypatch.setattr(prepare, "load_tensorrt", lambda: TensorRT(machine.trt, fail))


def have_no_memory(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(prepare, "TensorRTSegments", fail)


FAILURES: dict[str, tuple[Callable[[Machine, pytest.MonkeyPatch], None], str]] = {
    "onnx is not read": (fail_call("parse"), "cannot read the ONNX of first 1-4@2: unsupported operator"),
    "no tactic": (fail_call("build_serialized_network"), "cannot build a plan for first 1-4@2: no tactic found"),
    "no context": (fail_call("create_execution_context"), r"for first 1-4@2 \(first-\w+\.plan\): out of memory"),
    "full disk": (lambda _, patch: refuse_to_write(patch, errno.ENOSPC), "plans has no space for first-"),
    "quota": (lambda _, patch: refuse_to_write(patch, errno.EDQUOT), "plans has no space for first-"),
    "read-only": (lambda _, patch: refuse_to_write(patch, errno.EROFS), r"plan cannot be written: Read-only"),
    "no directory": (have_a_file_for_a_directory, "plans cannot be made"),
    "no driver": (have_no_driver, "CUDA does not work in this process: no driver"),
    "no memory": (have_no_memory, "CUDA out of memory"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_auto_falls_back_to_torch_with_one_reason_and_tensorrt_does_not(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    prepare, message = FAILURES[failure]
    prepare(machine, monkeypatch)
    with pytest.raises((TwostrokeError, torch.OutOfMemoryError), match=message) as raised:
        machine.select(backend="tensorrt")
    assert "\n" not in str(raised.value)
    with structlog.testing.capture_logs() as logs:
        selected = machine.select(backend="auto")
    assert selected.name == "torch" and isinstance(selected.backend, TorchBackend)
    [entry] = [entry for entry in logs if "reason" in entry and entry["log_level"] != "debug"]
    assert entry["event"] == "dense backend is torch" and re.search(message, entry["reason"])


def test_auto_with_missing_plans_selects_torch_and_names_the_build_command(machine: Machine) -> None:
    with structlog.testing.capture_logs() as logs:
        assert machine.select(backend="auto", build="never").name == "torch"
    assert len(logs) == 1 and "services.dense_worker.tensorrt.build --model" in logs[0]["reason"]


COMMANDS = {
    "float16 and few profiles": ("8.6.0", torch.float16, {"profiles": "1-2,3-8@5,9-16"}, {}),
    "dummy weights": ("10.0.1", torch.bfloat16, {}, {"load_format": "dummy"}),
    "one layer": ("10.0.1", torch.float32, {}, {"num_layers": 1}),
    "directory with a space": ("8.6.0", torch.float32, {"plan_dir": "my plans"}, {}),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_named_command_builds_exactly_the_missing_plans(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    version, dtype, dense, source = COMMANDS[name]
    machine.trt = make_tensorrt(version)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(build, "load_tensorrt", machine.load)
    monkeypatch.setattr(build, "current_gpu", lambda device: machine.gpu)
    monkeypatch.setattr(build, "_measure", lambda *arguments: None)
    path = machine.path
    if source.get("load_format") == "dummy":  # a directory without weights
        path = tmp_path / "config only"
        path.mkdir()
        shutil.copy(machine.path / "config.json", path)
    origin = ModelSection(path=path, **source)
    model = ResolvedModel(load_model_config(path, origin.num_layers), dtype, CPU, 64)
    section = DenseSection(
        **{"plan_dir": tmp_path / "plans", "profiles": "1-4,5-16", **dense}, backend="tensorrt", build="never"
    )
    with pytest.raises(ConfigError) as error:
        prepare_backend(section, origin, model, LIMITS, print)
    [command] = re.findall("run `(.*)`$", str(error.value))
    python, module_flag, module, *arguments = shlex.split(command)
    assert (python, module_flag, module) == ("python", "-m", "services.dense_worker.tensorrt.build")
    assert build.main(arguments) == 0
    num_built = len(machine.trt.named("build_serialized_network"))
    # Those that 8 tokens reach, and of `last` 4 rows.
    assert num_built == {"float16 and few profiles": 6, "one layer": 3}.get(name, 5)
    # The command left a record of what it exported.
    monkeypatch.setattr(onnx_segments, "export_networks", lambda *arguments: pytest.fail("exported again"))
    prepared = prepare_backend(section, origin, model, LIMITS, print)
    assert prepared.tensorrt is not None and sum(map(len, prepared.tensorrt.plans.values())) == num_built
    assert len(machine.trt.named("build_serialized_network")) == num_built


def test_plans_are_built_before_the_weights_take_memory(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that replaces another one has little memory, and a build needs much."""
    events: list[str] = []
    monkeypatch.setattr(dense_build, "load_weights", lambda *arguments: events.append("weights") or machine.weights)
    record = machine.trt.record

    def note(*call: Any) -> bool:
        events.append(call[0])
        return record(*call)

    monkeypatch.setattr(machine.trt, "record", note)
    config = Config(
        model=ModelSection(path=machine.path),
        dense=DenseSection(plan_dir=machine.plan_dir, profiles="1-16", backend="tensorrt"),
        scheduler=SchedulerSection(max_num_seqs=4, max_num_batched_tokens=8),
    )
    lines: list[str] = []
    loaded = dense_build.load_model(config, ResolvedModel(machine.config, torch.float32, CPU, 64), lines.append)
    assert loaded.backend == "TensorRT 10.0.1"
    kinds = [event for event in events if event in ("weights", "build_serialized_network", "create_execution_context")]
    assert kinds[:4] == ["build_serialized_network"] * 3 + ["weights"] and "create_execution_context" in kinds[4:]
    assert lines[0].startswith("[1/3] first 1-16@4: building") and lines[-1].startswith("[3/3] last 1-16@4: built")
