"""Plans in the directory that do not fit: the worker may not build, and says in one line what is wrong with them."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import structlog.testing
import torch

from services.common.config import DenseSection, ModelSection
from services.common.errors import CapacityError, ConfigError
from services.common.model_config import load_model_config
from services.common.resolve import ResolvedModel
from services.dense_worker.backends.select import PreparedBackend, prepare_backend
from services.dense_worker.tensorrt import prepare
from services.dense_worker.tensorrt.api import TensorRT
from services.dense_worker.tensorrt.files import atomic_file
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
        self.gpu, self.version, self.dtype = H200, "8.6.0", torch.float16
        self.lines: list[str] = []  # of the last start
        self.prepare("tensorrt", build="auto")

    def prepare(self, backend: str, build: str = "never") -> PreparedBackend:
        self.lines.clear()
        source = ModelSection(path=self.path, load_format="dummy")
        model = ResolvedModel(load_model_config(self.path), self.dtype, torch.device("cpu"), 64)
        section = DenseSection(backend=backend, build=build, plan_dir=self.plan_dir, profiles="1-16")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prepare, "current_gpu", lambda device: self.gpu)
            patch.setattr(prepare, "load_tensorrt", lambda: TensorRT(make_tensorrt(self.version)))
            return prepare_backend(section, source, model, Limits(8, 4), self.lines.append)


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


DAMAGED_PLAN = r"middle-[0-9a-f]+\.plan is missing, damaged or was changed"
CASES: dict[Callable[[Machine], None], tuple[str, str]] = {  # the first plan that does not fit, and what is said of it
    have_another_gpu: ("first", "gpu NVIDIA H100 instead of NVIDIA H200"),
    have_fewer_sms: ("first", "num_sms 66 instead of 132"),
    have_another_version: ("first", r"tensorrt TensorRT 8\.6\.1 instead of TensorRT 8\.6\.0"),
    have_another_dtype: ("first", "dtype float32 instead of float16; network [0-9a-f]{12}… instead of [0-9a-f]{12}…"),
    have_another_network: ("first", "network [0-9a-f]{12}… instead of [0-9a-f]{12}…"),
    cut_the_plan: ("middle", DAMAGED_PLAN),
    empty_the_plan: ("middle", DAMAGED_PLAN),
    change_a_byte: ("middle", DAMAGED_PLAN),
    have_a_directory_for_a_plan: ("middle", DAMAGED_PLAN),
    cut_the_record: ("middle", r"middle-[0-9a-f]+\.json is damaged or cannot be read"),
}


@pytest.mark.parametrize("change", CASES, ids=lambda change: change.__name__)
def test_an_unusable_plan_is_one_line_that_names_it_and_with_auto_torch_runs(
    machine: Machine, change: Callable[[Machine], None]
) -> None:
    segment, reason = CASES[change]
    expected = rf"segment {segment} 1-16@4 \({reason}\)"
    change(machine)
    with pytest.raises(ConfigError) as raised:
        machine.prepare("tensorrt")
    message = str(raised.value)
    assert re.search(expected, message) and str(machine.plan_dir) in message and "\n" not in message
    with structlog.testing.capture_logs() as logs:
        assert machine.prepare("auto").tensorrt is None
    assert [entry["event"] for entry in logs] == ["dense backend is torch"]
    assert re.search(expected, logs[0]["reason"])


@pytest.mark.parametrize("change", [each for each in CASES if each is not have_a_directory_for_a_plan])
def test_a_worker_that_may_build_says_what_is_unusable_and_replaces_it(
    machine: Machine, change: Callable[[Machine], None]
) -> None:
    segment, reason = CASES[change]
    change(machine)
    machine.prepare("tensorrt", build="auto")
    building = [line for line in machine.lines if ": building, " in line]
    assert re.fullmatch(rf"\[[123]/3\] {segment} 1-16@4: building, {reason}", building[0])
    assert len(building) == (3 if segment == "first" else 1)
    found = machine.prepare("tensorrt").tensorrt
    assert found is not None and set(found.plans) == {"first", "middle", "last"}


def test_a_plan_that_cannot_be_replaced_is_an_error_that_names_file_and_cause(machine: Machine) -> None:
    have_a_directory_for_a_plan(machine)
    with pytest.raises(ConfigError, match=rf"^{plan_file(machine)} cannot be written: Is a directory$"):
        machine.prepare("tensorrt", build="auto")


def test_a_disk_too_full_to_replace_a_damaged_plan_is_an_error_that_names_file_and_cause(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    change_a_byte(machine)
    expected = rf"{machine.plan_dir} has no space for {plan_file(machine).name}, \d+ bytes"
    with monkeypatch.context() as full, pytest.raises(CapacityError, match=rf"^{expected}$"):
        full.setattr(atomic_file.os, "fsync", fsync)
        machine.prepare("tensorrt", build="auto")
    assert re.search(f": building, {DAMAGED_PLAN}$", machine.lines[-1])
    machine.prepare("tensorrt", build="auto")  # there is space again
    assert machine.prepare("tensorrt").tensorrt is not None
