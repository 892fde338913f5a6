"""A worker that finds its plans exports nothing, and never takes the plans of another network."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.config import DenseSection, ModelSection
from services.common.errors import CapacityError, ConfigError
from services.common.model_config import load_model_config
from services.common.resolve import ResolvedModel
from services.dense_worker.backends.select import prepare_backend
from services.dense_worker.tensorrt import onnx_segments, prepare
from services.dense_worker.tensorrt.api import TensorRT
from services.dense_worker.tensorrt.engine_plan_cache import EnginePlans
from services.dense_worker.tensorrt.files import network_record
from services.dense_worker.tensorrt.gpu import Gpu
from services.dense_worker.tensorrt.onnx_segments import export_networks
from services.dense_worker.tensorrt.profiles import Limits
from tests.support.model_configs import VARIANTS, small_config, write_config
from tests.support.workers.fake_tensorrt import make_tensorrt

torch.set_num_threads(1)
# Those that 8 tokens and 4 rows reach.
PLANS = ["first 1-4@2", "first 5-16@8", "middle 1-4@2", "middle 5-16@8", "last 1-4@2"]


class Machine:
    """A directory of plans, a model and the program's sources, and starts of workers; each looks for its plans."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plan_dir, self.sources = directory / "plans", directory / "sources"
        self.path, self.dtype = write_config(directory / "model", "llama"), torch.float16
        self.trt, self.num_exports = make_tensorrt("8.6.0"), 0
        self.lines: list[str] = []  # of the last start
        self.monkeypatch = monkeypatch
        (self.sources / "model").mkdir(parents=True)
        (self.sources / "model" / "layer.py").write_text("a = 1")
        (self.sources / "head.py").write_text("b = 1")
        monkeypatch.setattr(network_record, "SOURCES", self.sources)
        monkeypatch.setattr(prepare, "current_gpu", lambda device: Gpu("NVIDIA H200", (9, 0), 132))
        monkeypatch.setattr(prepare, "load_tensorrt", lambda: TensorRT(self.trt))
        monkeypatch.setattr(onnx_segments, "export_networks", self.export)

    def export(self, *arguments: Any) -> dict[str, bytes]:
        self.num_exports += 1
        return export_networks(*arguments)

    def start(self, **section: Any) -> EnginePlans:
        self.lines.clear()
        model = ResolvedModel(load_model_config(self.path), self.dtype, torch.device("cpu"), 64)
        dense = DenseSection(**{"backend": "tensorrt", "plan_dir": self.plan_dir, "profiles": "1-4,5-16", **section})
        found = prepare_backend(dense, ModelSection(path=self.path), model, Limits(8, 4), self.lines.append).tensorrt
        assert found is not None
        return found.plans

    @property
    def own_digests(self) -> dict[str, str]:
        """By an export outside of the worker."""
        networks = export_networks(load_model_config(self.path), self.dtype)
        return {name: hashlib.sha256(network).hexdigest() for name, network in networks.items()}

    @property
    def num_built(self) -> int:
        return len(self.trt.named("build_serialized_network"))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def networks_of(plans: EnginePlans) -> dict[str, str]:
    """The network of each segment's plans, which must be one."""
    found = {name: {cached.record.key.network for cached in of_segment} for name, of_segment in plans.items()}
    return {name: network for name, [network] in found.items()}


def test_a_second_start_exports_nothing_and_finds_the_same_plans(machine: Machine) -> None:
    first = machine.start()
    assert machine.num_exports == 1
    for build in ("auto", "never"):
        assert machine.start(build=build) == first
        assert machine.num_exports == 1
        assert len(machine.lines) == sum(map(len, first.values())) and all(": found" in line for line in machine.lines)


def test_a_found_plan_is_reported_as_after_an_export(machine: Machine) -> None:
    machine.start()
    machine.start()
    with_record = list(machine.lines)
    assert [line.split("] ")[1].split(":")[0] for line in with_record] == PLANS
    for record in machine.plan_dir.glob("networks_*"):
        record.unlink()
    machine.start()
    assert machine.num_exports == 2 and machine.lines == with_record


def have_another_dtype(machine: Machine) -> None:
    machine.dtype = torch.float32


def have_another_epsilon(machine: Machine) -> None:
    config = machine.path / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))


@pytest.mark.parametrize("change", [have_another_dtype, have_another_epsilon])
def test_a_changed_model_is_exported_and_gets_its_own_plans(
    machine: Machine, change: Callable[[Machine], None]
) -> None:
    before = machine.start()
    num_built = machine.num_built
    change(machine)
    changed = machine.start()
    assert machine.num_exports == 2 and machine.num_built == 2 * num_built
    assert networks_of(changed) == machine.own_digests != networks_of(before)


def test_models_that_share_a_directory_are_exported_once_each(machine: Machine) -> None:
    plans = {}
    for dtype in (torch.float16, torch.float32):
        machine.dtype = dtype
        plans[dtype] = machine.start()
    for dtype, expected in plans.items():
        machine.dtype = dtype
        assert machine.start() == expected and machine.num_exports == 2


def change_a_file(machine: Machine) -> None:
    (machine.sources / "model" / "layer.py").write_text("a = 2")


def rename_a_file(machine: Machine) -> None:
    (machine.sources / "head.py").rename(machine.sources / "half.py")  # still the first one


def add_a_file(machine: Machine) -> None:
    (machine.sources / "empty.py").touch()


def put_two_files_in_one(machine: Machine) -> None:
    """All names and contents after each other are the same text as before."""
    (machine.sources / "model" / "layer.py").unlink()
    (machine.sources / "head.py").write_text("b = 1model/layer.pya = 1")


def have_another_torch(machine: Machine) -> None:
    machine.monkeypatch.setattr(network_record.torch, "__version__", "9.9")


def have_another_onnx(machine: Machine) -> None:
    machine.monkeypatch.setattr(network_record, "version", lambda package: "9.9")


CHANGES = [
    change_a_file,
    rename_a_file,
    add_a_file,
    put_two_files_in_one,
    have_another_torch,
    have_another_onnx,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_program_exports_again(machine: Machine, change: Callable[[Machine], None]) -> None:
    """And where the export is still the same network, the plans are."""
    before = machine.start()
    change(machine)
    assert machine.start() == before and machine.num_exports == 2
    assert machine.start() == before and machine.num_exports == 2


def test_a_program_that_exports_another_network_gets_other_plans(machine: Machine) -> None:
    before = machine.start()
    change_a_file(machine)
    other = export_networks(small_config("llama", rms_norm_eps=0.5), machine.dtype)
    machine.monkeypatch.setattr(onnx_segments, "export_networks", lambda *arguments: other)
    changed = machine.start()
    digests = {name: hashlib.sha256(network).hexdigest() for name, network in other.items()}
    assert networks_of(changed) == digests != networks_of(before)
    assert networks_of(machine.start()) == digests


def test_the_sources_contain_every_module_of_the_program() -> None:
    files = [Path(module.__file__) for name, module in list(sys.modules.items()) if name.startswith("services.")]
    assert len(files) > 50 and all(file.is_relative_to(network_record.SOURCES) for file in files)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_config_is_written_alike_in_every_process(variant: str) -> None:
    """The record is found by the config's `repr`, which must hold no addresses."""
    family, overrides = VARIANTS[variant]
    assert " at 0x" not in repr(small_config(family, **overrides))


def test_a_missing_plan_is_named_or_built_alone(machine: Machine) -> None:
    before, num_built = machine.start(), machine.num_built
    missing = before["middle"][1].record.key
    (machine.plan_dir / f"{missing.file_stem}.plan").unlink()
    message = r"no plan for the segment middle 5-16@8 \(middle-\w+\.plan is missing, .* 'never': run `"
    with pytest.raises(ConfigError, match=message):
        machine.start(build="never")
    assert networks_of(machine.start()) == networks_of(before) and machine.num_built == num_built + 1


@pytest.mark.parametrize("content", ["", "{", "[]", '{"networks": {"first": "0"}}', '{"origin": "0", "networks": {}}'])
def test_a_damaged_record_does_not_count_and_is_replaced(machine: Machine, content: str) -> None:
    before = machine.start()
    [record] = machine.plan_dir.glob("networks_*")
    good = record.read_text()
    record.write_text(content)
    assert machine.start(build="never") == before and machine.num_exports == 2
    assert record.read_text() == good


def test_a_directory_that_takes_no_record_only_costs_an_export(machine: Machine) -> None:
    def refuse(path: Path, data: bytes) -> None:
        raise CapacityError(f"{path.parent} has no space for {path.name}, {len(data)} bytes")

    machine.monkeypatch.setattr(network_record, "write_atomically", refuse)
    before = machine.start()
    assert "the record of the networks is not kept: " in machine.lines[-1] and "no space" in machine.lines[-1]
    assert machine.start(build="never") == before and machine.num_exports == 2
