"""`build`: real plans by TensorRT-RTX, which needs no GPU, and the command's behaviour on the stand-in."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
import tensorrt_rtx_bindings
import torch

from services.common.errors import ConfigError
from services.dense_worker.tensorrt import build, engine_segments, export, measure
from services.dense_worker.tensorrt.api import TensorRT, load_tensorrt
from services.dense_worker.tensorrt.engine_plan_builder import EnginePlanBuilder
from services.dense_worker.tensorrt.engine_plan_cache import EnginePlanCache, EnginePlans
from services.dense_worker.tensorrt.gpu import Gpu
from services.dense_worker.tensorrt.onnx_segments import export_networks
from services.dense_worker.tensorrt.profiles import parse_profiles
from tests.support.model_configs import VARIANTS, small_config, write_config
from tests.support.workers import fake_tensorrt, fake_tensorrt_runtime
from tests.support.workers.fake_tensorrt import make_tensorrt

torch.set_num_threads(1)
H200 = Gpu("NVIDIA H200", (9, 0), 132)


class Recorder:
    """A builder's lines, and how many plans it built."""

    def __init__(self, api: TensorRT, gpu: Gpu | None, directory: Path, profiles: str = "1-16,17-64") -> None:
        self.lines: list[str] = []
        self.builder = EnginePlanBuilder(api, gpu, parse_profiles(profiles), EnginePlanCache(directory))

    def run(self, networks: dict[str, bytes], dtype: torch.dtype = torch.float16) -> EnginePlans:
        self.lines.clear()
        return self.builder.find_or_build(networks, dtype, None, self.lines.append)

    @property
    def num_built(self) -> int:
        return sum("building" in line for line in self.lines)


@pytest.fixture(scope="module")
def networks() -> dict[str, bytes]:
    return export_networks(small_config("llama"), torch.float16)


@pytest.mark.parametrize("variant", VARIANTS)
def test_tensorrt_rtx_builds_every_segment_of_every_family(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    dtype = torch.float16 if variant == "qwen3" else torch.bfloat16
    networks = export_networks(small_config(family, **overrides), dtype)
    profiles = "1-1,2-8192" if variant == "llama" else "1-16"
    plans = Recorder(load_tensorrt(), None, tmp_path, profiles).run(networks, dtype)
    assert list(plans) == ["first", "middle", "last"]
    for of_segment in plans.values():
        assert [str(cached.profile) for cached in of_segment] == [
            str(profile) for profile in parse_profiles(profiles)
        ]
        assert all(len(cached.plan) > 10_000 for cached in of_segment)


def test_tensorrt_rtx_builds_float32(tmp_path: Path) -> None:
    networks = export_networks(small_config("qwen2", num_hidden_layers=1), torch.float32)
    assert list(Recorder(load_tensorrt(), None, tmp_path, "1-16").run(networks, torch.float32)) == [
        "first",
        "last",
    ]


def test_33_layers_build_what_3_layers_build(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for num_layers in (3, 33):
        networks = export_networks(small_config("llama", num_hidden_layers=num_layers), torch.bfloat16)
        plans = Recorder(load_tensorrt(), None, tmp_path / str(num_layers), "1-16").run(
            networks, torch.bfloat16
        )
        with capsys.disabled():
            sizes = ", ".join(f"{name} {cached.record.plan_bytes} B" for name, [cached] in plans.items())
            seconds = sum(cached.record.build_s for [cached] in plans.values())
            print(f"\n{num_layers} layers: {sizes}, built in {seconds:.2f} s", end="")
    three, many = (Recorder(load_tensorrt(), None, tmp_path / n, "1-16") for n in ("3", "33"))
    assert [p.name for p in sorted((tmp_path / "3").iterdir())] == [
        p.name for p in sorted((tmp_path / "33").iterdir())
    ]
    assert {n: c.record.plan_bytes for n, [c] in three.run(networks, torch.bfloat16).items()} == {
        n: c.record.plan_bytes for n, [c] in many.run(networks, torch.bfloat16).items()
    }
    assert three.num_built == 0  # the 33-layer networks find the 3-layer plans


def test_stand_in_has_no_name_that_the_real_tensorrt_rtx_lacks() -> None:
    real, fake = tensorrt_rtx_bindings, make_tensorrt("1.7.1", is_rtx=True)
    own = {"calls", "fail", "gpu", "major", "has_gpu", "is_rtx", "record", "named", "timings_header"}
    own |= {"is_capturing", "num_contexts", "runs"}
    for name in {name for name in dir(fake) if not name.startswith("_")} - own:
        assert hasattr(real, name), name
    for name in vars(fake.BuilderFlag):
        assert name in real.BuilderFlag.__members__
    pairs = [
        (fake_tensorrt._Builder, real.Builder),
        (fake_tensorrt._BuilderConfig, real.IBuilderConfig),
        (fake_tensorrt._Profile, real.IOptimizationProfile),
        (fake_tensorrt._Parser, real.OnnxParser),
        (fake_tensorrt._Network, real.INetworkDefinition),
        (fake_tensorrt_runtime.FakeRuntime, real.Runtime),
        (fake_tensorrt_runtime.Engine11, real.ICudaEngine),
        (fake_tensorrt_runtime.Context11, real.IExecutionContext),
    ]
    for stand_in, original in pairs:
        for name in {name for name in dir(stand_in) if not name.startswith("_")} - {
            "memory_size",
            "make_context",
        }:
            assert hasattr(original, name), f"{original.__name__}.{name}"


def test_second_run_builds_nothing_and_says_so(networks: dict[str, bytes], tmp_path: Path) -> None:
    trt = make_tensorrt("8.6.0")
    recorder = Recorder(TensorRT(trt), H200, tmp_path)
    recorder.run(networks)
    assert recorder.num_built == 6
    recorder.run(networks)
    assert (
        recorder.num_built == 0
        and [line.split(": ")[1].split()[0] for line in recorder.lines] == ["found"] * 6
    )
    assert len(trt.named("build_serialized_network")) == 6


def test_a_changed_key_rebuilds_and_says_why(networks: dict[str, bytes], tmp_path: Path) -> None:
    api = TensorRT(make_tensorrt("8.6.0"))
    Recorder(api, H200, tmp_path).run(networks)
    changes = [
        (Recorder(api, Gpu("NVIDIA H200", (9, 0), 66), tmp_path), networks, "num_sms 66 instead of 132"),
        (
            Recorder(api, Gpu("NVIDIA H100", (9, 0), 132), tmp_path),
            networks,
            "gpu NVIDIA H100 instead of NVIDIA H200",
        ),
        (
            Recorder(TensorRT(make_tensorrt("10.0.1")), H200, tmp_path),
            networks,
            "tensorrt TensorRT 10.0.1 instead of",
        ),
        (Recorder(api, H200, tmp_path), networks | {"middle": networks["middle"] + b"\x12\x00"}, "network "),
    ]
    for recorder, changed, why in changes:
        recorder.run(changed)
        reasons = [line for line in recorder.lines if "building" in line]
        assert reasons and all(why in line for line in reasons), recorder.lines


def test_rtx_plans_serve_every_gpu(networks: dict[str, bytes], tmp_path: Path) -> None:
    api = TensorRT(make_tensorrt("1.7.1", is_rtx=True))
    Recorder(api, None, tmp_path).run(networks)
    with_gpu = Recorder(api, Gpu("RTX 5090", (12, 0), 170), tmp_path)
    with_gpu.run(networks)
    assert with_gpu.num_built == 0


def test_builds_on_the_gpu_that_will_run_the_plan(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"TensorRT 10\.0\.1 builds on the GPU that will run the plan"):
        Recorder(TensorRT(make_tensorrt("10.0.1")), None, tmp_path)


def _build_in_a_process(directory: str, networks: dict[str, bytes], results: Any) -> None:
    trt = make_tensorrt("8.6.0")
    recorder = Recorder(TensorRT(trt), H200, Path(directory))
    original = trt.record

    def slow(*call: Any) -> bool:
        if call[0] == "build_serialized_network":
            time.sleep(0.2)
        return original(*call)

    trt.record = slow
    plans = recorder.run(networks)
    results.put(
        (len(trt.named("build_serialized_network")), {name: [each.plan for each in of] for name, of in plans.items()})
    )


def test_two_processes_at_once_build_every_plan_once(networks: dict[str, bytes], tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    arguments = (str(tmp_path), networks, results)
    processes = [context.Process(target=_build_in_a_process, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(timeout=60)
    assert sum(num_built for num_built, _ in found) == 6
    assert found[0][1] == found[1][1]
    assert not list(tmp_path.glob(".*"))


def test_an_interrupted_build_leaves_no_half_plan(
    networks: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(TensorRT(make_tensorrt("8.6.0")), H200, tmp_path)

    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("services.dense_worker.tensorrt.files.atomic_file.os.fsync", interrupt)
        recorder.run(networks)
    assert [path.name for path in tmp_path.iterdir()] == ["build.lock"]
    recorder.run(networks)
    assert recorder.num_built == 6


@pytest.fixture
def on_an_h200(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command on a machine with an H200 and the stand-in of TensorRT 8.6, its memory on the CPU."""
    trt = make_tensorrt("8.6.0")
    monkeypatch.setattr(build, "load_tensorrt", lambda: TensorRT(trt))
    monkeypatch.setattr(build, "current_gpu", lambda device: H200)
    monkeypatch.setattr(measure, "current_stream", lambda: 7)
    monkeypatch.setattr(measure, "synchronize", lambda: None)
    monkeypatch.setattr(measure, "time_on_gpu", lambda call: float(bool(call() is not None)) + 1)
    monkeypatch.setattr(engine_segments, "ALIGNMENT_BYTES", 64)
    return trt


def command(*arguments: object) -> int:
    return build.main(["--device", "cpu", *map(str, arguments)])


def test_command_builds_measures_and_inspects(
    on_an_h200: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, plans = write_config(tmp_path / "model", "qwen3"), tmp_path / "plans"
    arguments = ("--model", model, "--output-dir", plans, "--load-format", "dummy", "--dtype", "float16")
    assert command(*arguments, "--profiles", "1-4,5-8") == 0
    printed = capsys.readouterr().out
    assert "[3/6] middle 1-4@2: building, no plan yet" in printed and "[6/6] last 5-8@8: built last-" in printed
    assert "middle 8: TensorRT" in printed
    assert command(*arguments, "--profiles", "1-4,5-8") == 0
    printed = capsys.readouterr().out
    assert "found" in printed and "building" not in printed and "measuring" not in printed
    assert command("--inspect", "--output-dir", plans) == 0
    printed = capsys.readouterr().out
    for expected in (
        "profile   1-4@2\n",
        "profile   5-8@8\n",
        "attn_out         float16   ['num_tokens', 64]",
        "q_norm",
        "4 Gemm",
    ):
        assert expected in printed
    assert "Myelin  gemm_add  {ForeignNode[a...b]}" in printed
    assert len(list(plans.glob("*.plan"))) == 6


def test_command_builds_from_an_export(
    on_an_h200: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = write_config(tmp_path / "model", "llama"), tmp_path / "out"
    dummy = ("--load-format", "dummy", "--dtype", "float16")
    assert export.main(["--model", str(model), "--output-dir", str(out), *dummy]) == 0
    plans = ("--output-dir", tmp_path / "plans", "--profiles", "1-8")
    assert command("--onnx", out, *plans) == 0
    assert command("--model", model, *dummy, *plans) == 0
    assert len(on_an_h200.named("build_serialized_network")) == 3  # the same networks, hence the same plans
    assert command("--onnx", out, "--dtype", "float32", *plans) == 1
    middle = out / "middle.onnx"
    middle.write_bytes(middle.read_bytes() + b"\x12\x00")
    assert command("--onnx", out, *plans) == 1
    (out / "manifest.json").write_text(json.dumps({"format": 1}))
    assert command("--onnx", out, *plans) == 1
    middle.unlink()
    assert command("--onnx", tmp_path, *plans) == 1
    errors = capsys.readouterr().err.splitlines()
    assert "--dtype is float32" in errors[0] and "was exported in float16" in errors[0]
    assert "middle.onnx was changed after its export" in errors[1]
    assert "format 1, supported: 2" in errors[2]
    assert f"{tmp_path} is no export" in errors[3]


@pytest.mark.parametrize(
    ("overrides", "arguments", "message"),
    [
        ({}, [], "has neither model.safetensors nor"),
        ({}, ["--load-format", "dummy"], "TensorRT 8.6.0 has no bfloat16: use float16"),
        ({}, ["--load-format", "dummy", "--num-layers", "9"], "num_layers is 9"),
        ({}, ["--load-format", "dummy", "--profiles", "1-16,32-64"], "must go on at 17"),
        (
            {},
            ["--load-format", "dummy", "--dtype", "float16", "--profiles", "1-8", "--max-num-seqs", "9"],
            "max_num_seqs is 9, dense.profiles '1-8@4' end at 8",
        ),
        ({"model_type": "rwkv"}, ["--load-format", "dummy"], "model_type 'rwkv', supported: llama, mistral"),
    ],
)
def test_command_refuses_in_one_line(
    on_an_h200: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    overrides: dict[str, Any],
    arguments: list[str],
    message: str,
) -> None:
    file = write_config(tmp_path / "model", "llama") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | overrides))
    assert command("--model", tmp_path / "model", "--output-dir", tmp_path / "plans", *arguments) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "plans").exists()


@pytest.mark.parametrize("limit", ["0", "-1", "1.5"])
@pytest.mark.parametrize("option", ["--max-num-seqs", "--max-num-batched-tokens"])
def test_command_refuses_a_limit_that_no_server_has(
    option: str, limit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        command("--model", tmp_path, option, limit)
    assert raised.value.code == 2
    assert f"argument {option}: {limit!r} is not a number from 1 on" in capsys.readouterr().err


def test_command_says_that_the_disk_is_full(
    on_an_h200: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("services.dense_worker.tensorrt.files.atomic_file.os.fsync", full)
    model = write_config(tmp_path / "model", "llama")
    arguments = (
        "--model",
        model,
        "--output-dir",
        tmp_path / "plans",
        "--load-format",
        "dummy",
        "--dtype",
        "float16",
    )
    assert command(*arguments) == 1
    assert "has no space for first-" in capsys.readouterr().err


def test_command_needs_a_model_or_something_to_inspect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command("--output-dir", tmp_path)
    assert command("--inspect", "--output-dir", tmp_path) == 1
    assert f"{tmp_path} holds no plans" in capsys.readouterr().err
