"""`twostroke doctor`: what is wrong with a machine, a line with a mend for each thing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.config import EMBEDDED_MODEL, Config, load_config
from services.console import doctor
from services.console.doctor import GIB, Finding
from tests.support.cluster import REPOSITORY, free_port
from tests.support.dense.vision_models import make_vision_model

TIMEOUT_S = 60.0


def test_a_machine_that_can_serve_has_status_0_and_torch_is_not_imported() -> None:
    flags = [
        "--port",
        str(free_port()),
        "--set",
        f"gateway.address=127.0.0.1:{free_port()}",
        "--set",
        "dense.device=cpu",
    ]
    code = "import sys; from services.console.__main__ import run; status = run(sys.argv[1:])\n"
    code += "print('torch' in sys.modules, file=sys.stderr); sys.exit(status)"
    command = [sys.executable, "-c", code, "doctor", *flags]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    *lines, summary = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary.startswith(f"{len(lines)} checks, 0 failures")
    assert all(line.split()[0] in ("ok", "warning") for line in lines)
    assert f"packages: {len(doctor.installed_requirements())} have" in done.stdout
    assert done.stderr.splitlines()[-1] == "False", "torch takes seconds to import"


def test_a_taken_port_is_a_failure_with_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        flags = ["--port", str(port), "--set", f"gateway.address=127.0.0.1:{free_port()}"]
        assert doctor.main(flags) == 1
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("failure")]
    assert f"gateway.http_address 127.0.0.1:{port}" in line and line.endswith("by --port")


def fake_systemctl(directory: Path, listen: str, state: str = "active") -> str:
    """Lets `systemctl` say that twostroke.socket is in this state; returns the PATH with it."""
    program = directory / "systemctl"
    said = f"Listen={listen} (Stream)\nActiveState={state}\n"
    program.write_text(f'#!/bin/sh\n[ "$2" = twostroke.socket ] && printf "{said}"\n')
    program.chmod(0o755)
    return f"{directory}:{os.environ['PATH']}"


def test_a_port_that_systemd_holds_for_the_server_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        config = load_config(None, [f"gateway.http_address={address}"])
        for listen, state, expected in (
            (address, "active", f"ok       port: gateway.http_address {address} is held by systemd's twostroke.socket"),
            ("0.0.0.0:8080", "active", f"failure  port: gateway.http_address is {address}, and systemd listens at 0"),
            (address, "inactive", f"failure  port: cannot listen on gateway.http_address {address}: port in use"),
        ):
            monkeypatch.setenv("PATH", fake_systemctl(tmp_path, listen, state))
            assert str(doctor.check_http_port(config, doctor.address_of_unit())).startswith(expected)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert doctor.address_of_unit() is None, "without systemd"


@pytest.mark.parametrize("listen", ["127.0.0.1:9", "/run/twostroke.sock"])
def test_a_port_that_another_server_has_is_not_called_systemds(
    listen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket unit says where the server listens if systemd starts it, and not if somebody else does."""
    monkeypatch.setenv("PATH", fake_systemctl(tmp_path, listen, "active"))
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        config = load_config(None, [])
        own = f"127.0.0.1:{foreign.getsockname()[1]}"
        gateway = config.gateway.model_copy(update={"http_address": own})
        gateway.model_fields_set.discard("http_address")  # as the default is
        found = doctor.check_http_port(config.model_copy(update={"gateway": gateway}), doctor.address_of_unit())
    assert found.state == "warning" and found.text.startswith(f"gateway.http_address {own} is in use, and systemd's")
    assert found.mend == "let systemd start it, or choose another port by --port"


def test_a_length_that_a_start_refuses_is_a_failure() -> None:
    sentence = "model.max_model_len is 99999, the model's positions end at 2048 and its RoPE is not scaled: set it to"
    finding = doctor.check_model(load_config(None, ["model.max_model_len=99999"]))
    assert finding.state == "failure" and finding.text.startswith(sentence)
    assert doctor.check_model(load_config(None, ["model.max_model_len=2048"])).state == "ok"


def test_a_model_by_name_is_not_downloaded(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.main(["org/no-such-model"])
    assert "ok       model: org/no-such-model is not examined: serve downloads" in capsys.readouterr().out


def test_packages_are_compared_with_what_was_tested() -> None:
    torch, numpy = importlib.metadata.version("torch"), importlib.metadata.version("numpy")
    release = torch.partition("+")[0]
    assert doctor.check_packages([f"torch=={release}", f"numpy=={numpy}"]).state == "ok"
    other = doctor.check_packages([f"torch=={release}", "numpy==0.1"])
    assert (other.state, other.text) == ("warning", f"numpy is {numpy}, tested with 0.1")
    assert other.mend == f"{sys.executable} -m pip install numpy==0.1"
    missing = doctor.check_packages(["no-such-package==1.0", "numpy==0.1"])
    assert missing.state == "failure" and "no-such-package is not installed, 1.0 is needed" in missing.text
    assert missing.mend.endswith("no-such-package==1.0 numpy==0.1")


@pytest.mark.parametrize(
    ("driver", "cuda", "state", "named"),
    [
        ("580.65.06", "13.0", "ok", "driver 580.65.06"),
        ("570.86.15", "13.0", "failure", "driver 570.86.15 is too old for torch's CUDA 13.0"),
        ("535.54.03", "12.8", "ok", "driver 535.54.03"),
        ("470.57.02", "12.8", "failure", "too old"),
        (None, "13.0", "warning", "unknown"),
        ("600.1", "14.0", "warning", "not known"),
    ],
)
def test_a_driver_must_be_as_new_as_torchs_cuda(driver: str | None, cuda: str, state: str, named: str) -> None:
    finding = doctor.check_driver(driver, cuda)
    assert finding.state == state and named in finding.text
    assert bool(finding.mend) == (state != "ok")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13\nGCC version:  gcc 9.3.0\n",
            "470.57.02",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n", "580.65.06"),
        ("something else\n", None),
    ],
)
def test_the_version_of_the_driver_is_read(
    text: str, version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "DRIVER_FILE", tmp_path / "version")
    assert doctor.driver_version() is None
    (tmp_path / "version").write_text(text)
    assert doctor.driver_version() == version


def findings_of_gpu(monkeypatch: pytest.MonkeyPatch, has_gpu: bool, cuda: str | None, *settings: str) -> list[Finding]:
    monkeypatch.setattr(doctor, "has_gpu", lambda: has_gpu)
    monkeypatch.setattr(doctor, "torch_cuda", lambda: cuda)
    monkeypatch.setattr(doctor, "driver_version", lambda: "580.65.06")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    return list(doctor.check_gpu(load_config(None, settings)))


def test_a_gpu_needs_torch_for_cuda_and_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    [built_for_cpus] = findings_of_gpu(monkeypatch, True, None)
    assert built_for_cpus.state == "warning" and "built for CPUs" in built_for_cpus.text
    driver, mps = findings_of_gpu(monkeypatch, True, "13.0")
    assert driver.state == "ok" and mps.state == "warning" and "nvidia-cuda-mps-control" in mps.text


def test_without_a_gpu_only_a_config_that_wants_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [each.state for each in findings_of_gpu(monkeypatch, False, "13.0")] == ["ok"]
    assert [each.state for each in findings_of_gpu(monkeypatch, True, "13.0", "dense.device=cpu")] == ["ok"]
    assert [each.state for each in findings_of_gpu(monkeypatch, False, "13.0", "dense.device=cuda")] == ["failure"]


@pytest.mark.parametrize(
    ("num_bytes", "state"), [(None, "failure"), (2**20, "failure"), (64 * 2**20, "warning"), (2 * GIB, "ok")]
)
def test_shared_memory_must_hold_the_regions(num_bytes: int | None, state: str) -> None:
    finding = doctor.check_shared_memory(num_bytes)
    assert finding.state == state and ("--shm-size" in finding.mend) == (state != "ok")


def test_open_files_must_suffice_for_all_connections() -> None:
    config = load_config(None, ["gateway.max_connections=4096", "gateway.max_grpc_connections=1024"])
    finding = doctor.check_open_files(config, 1024)
    assert finding.state == "warning" and "1024 may be open" in finding.text
    needed = int(finding.mend.split()[2].strip(","))
    assert needed > 4096 + 1024 and doctor.check_open_files(config, needed).state == "ok"
    assert doctor.check_open_files(config, needed - 1).state == "warning"
    assert doctor.check_open_files(config, resource.RLIM_INFINITY).state == "ok"


def test_a_directory_must_be_writable_and_have_room(tmp_path: Path) -> None:
    assert doctor.check_directory("cache", tmp_path / "not" / "yet", 1, "set X").state == "ok"
    full = doctor.check_directory("cache", tmp_path, 2**62, "set X")
    assert full.state == "warning" and full.mend == "make room, or set X"
    (tmp_path / "file").touch()
    assert doctor.check_directory("cache", tmp_path / "file" / "below", 1, "set X").state == "failure"


def model_finding(path: Path, **changes: object) -> Finding:
    config = Config()
    return doctor.check_model(
        config.with_values("model", path=path, **changes)
    )


def test_a_model_must_be_supported_and_have_weights(tmp_path: Path) -> None:
    assert model_finding(EMBEDDED_MODEL).state == "ok"
    missing = model_finding(tmp_path)
    assert missing.state == "failure" and "config.json" in missing.text
    raw = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "pytorch_model.bin").touch()
    assert "has no safetensors" in model_finding(tmp_path).text
    assert model_finding(tmp_path, load_format="dummy").state == "ok"
    (tmp_path / "config.json").write_text(json.dumps(raw | {"model_type": "electra"}))
    assert "'electra'" in model_finding(tmp_path).text


def test_a_model_without_its_tokenizer_is_a_failure(tmp_path: Path) -> None:
    path = shutil.copytree(EMBEDDED_MODEL, tmp_path / "model")
    assert model_finding(path).state == "ok"
    (path / "tokenizer.json").unlink()
    found = model_finding(path)
    assert found.state == "failure" and "has no tokenizer" in found.text
    assert model_finding(path, load_format="dummy").state == "ok"


def test_a_model_without_its_image_processor_is_a_warning(tmp_path: Path) -> None:
    path = make_vision_model(tmp_path, "llava")
    shutil.copy(EMBEDDED_MODEL / "tokenizer.json", path)
    assert model_finding(path).state == "ok"
    (path / "preprocessor_config.json").unlink()
    found = model_finding(path)
    assert found.state == "warning" and "processor_config.json with 'image_processor'" in found.text
    assert model_finding(path, images=False).state == "ok"


def test_what_does_not_fit_into_memory_is_a_failure() -> None:
    cpu = ["dense.device=cpu", "attention.device=cpu"]
    states = [each.state for each in doctor.check_memory(load_config(None, cpu))]
    assert states == ["ok", "ok"], "host memory and /dev/shm"
    host, _ = doctor.check_memory(load_config(None, [*cpu, f"attention.kv_cache_bytes={2**60}"]))
    assert host.state == "failure" and f"the KV cache {2**60}" in host.text
