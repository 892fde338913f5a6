"""Plans in the directory that do not fit: the worker may not build, and says in one line what is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import structlog.testing
import torch

from services.common.config import DenseSection, ModelSection
from services.common.errors import ConfigError
from services.common.model_config import load_model_config
from services.common.resolve import ResolvedModel
from services.dense_worker.backends import select
from services.dense_worker.backends.select import PreparedBackend, prepare_backend
from services.dense_worker.tensorrt.api import TensorRT
from services.dense_worker.tensorrt.gpu import Gpu
from services.dense_worker.tensorrt.profiles import Limits
from tests.support.model_configs import write_config
from tests.support.workers.fake_tensorrt import make_tensorrt

torch.set_num_threads(1)
H200 = Gpu("NVIDIA H200", (9, 0), 132)


class Machine:
    """A machine with plans of a model in float16, and with whatever changes afterwards."""

    def __init__(self, directory: Path) -> None:
        self.plan_dir, self.path = directory / "plans", write_config(directory / "model", "llama")
        self.gpu, self.version, self.dtype, self.num_layers = H200, "8.6.0", torch.float16, None
        self.prepare("tensorrt", build="auto")

    def prepare(self, backend: str, build: str = "never") -> PreparedBackend:
        source = ModelSection(path=self.path, load_format="dummy")
        model = ResolvedModel(load_model_config(self.path), self.dtype, torch.device("cpu"), 64)
        section = DenseSection(backend=backend, build=build, plan_dir=self.plan_dir, profiles="1-16")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(select, "current_gpu", lambda device: self.gpu)
            patch.setattr(select, "load_tensorrt", lambda: TensorRT(make_tensorrt(self.version)))
            return prepare_backend(section, source, model, Limits(8, 4), lambda line: None)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def plan_file(machine: Machine) -> Path:
    [file] = machine.plan_dir.glob("middle-*.plan")
    return file


def have_another_gpu(machine: Machine) -> None:
    machine.gpu = replace(H200, name="NVIDIA H100")


def have_fewer_sms(machine: Machine) -> None:
    machine.gpu = replace(H200, num_sms=66)


def have_another_version(machine: Machine) -> None:
    machine.version = "8.6.1"


def have_another_dtype(machine: Machine) -> None:
    machine.dtype = torch.float32


def have_another_network(machine: Machine) -> None:
    config = machine.path / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))


def cut_the_plan(machine: Machine) -> None:
    plan_file(machine).write_bytes(plan_file(machine).read_bytes()[:-1])


def empty_the_plan(machine: Machine) -> None:
    plan_file(machine).write_bytes(b"")


def change_a_byte(machine: Machine) -> None:
    content = bytearray(plan_file(machine).read_bytes())
    content[len(content) // 2] ^= 1
    plan_file(machine).write_bytes(content)


def have_a_directory_for_a_plan(machine: Machine) -> None:
    file = plan_file(machine)
    file.unlink()
    file.mkdir()


def cut_the_record(machine: Machine) -> None:
    record = plan_file(machine).with_suffix(".json")
    record.write_text(record.read_text()[:99])


CASES: dict[Callable[[Machine], None], str] = {
    have_another_gpu: r"segment first 1-16@4 \(gpu NVIDIA H100 instead of NVIDIA H200\)",
    have_fewer_sms: r"segment first 1-16@4 \(num_sms 66 instead of 132\)",
    have_another_version: r"segment first 1-16@4 \(tensorrt TensorRT 8\.6\.1 instead of TensorRT 8\.6\.0\)",
    have_another_dtype: r"segment first 1-16@4 \(dtype float32 instead of float16; network [0-9a-f]{12}… instead of",
    have_another_network: r"segment first 1-16@4 \(network [0-9a-f]{12}… instead of [0-9a-f]{12}…\)",
    cut_the_plan: r"segment middle 1-16@4 \(middle-[0-9a-f]+\.plan is missing, damaged or was changed\)",
    empty_the_plan: r"segment middle 1-16@4 \(middle-[0-9a-f]+\.plan is missing, damaged or was changed\)",
    change_a_byte: r"segment middle 1-16@4 \(middle-[0-9a-f]+\.plan is missing, damaged or was changed\)",
    have_a_directory_for_a_plan: r"segment middle 1-16@4 \(middle-[0-9a-f]+\.plan is missing, damaged or was changed\)",
    cut_the_record: r"segment middle 1-16@4 \(no plan yet\)",
}


@pytest.mark.parametrize("change", CASES, ids=lambda change: change.__name__)
def test_an_unusable_plan_is_one_line_that_names_it_and_with_auto_torch_runs(
    machine: Machine, change: Callable[[Machine], None]
) -> None:
    change(machine)
    with pytest.raises(ConfigError) as raised:
        machine.prepare("tensorrt")
    message = str(raised.value)
    assert re.search(CASES[change], message) and str(machine.plan_dir) in message and "\n" not in message
    with structlog.testing.capture_logs() as logs:
        assert machine.prepare("auto").tensorrt is None
    assert [entry["event"] for entry in logs] == ["dense backend is torch"]
    assert re.search(CASES[change], logs[0]["reason"])


@pytest.mark.parametrize("change", [each for each in CASES if each is not have_a_directory_for_a_plan])
def test_a_worker_that_may_build_replaces_what_is_unusable(
    machine: Machine, change: Callable[[Machine], None]
) -> None:
    change(machine)
    machine.prepare("tensorrt", build="auto")
    found = machine.prepare("tensorrt").tensorrt
    assert found is not None and set(found.plans) == {"first", "middle", "last"}
