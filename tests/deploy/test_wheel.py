"""The wheel, installed where nothing else of this repository is: it serves, and other packages do not confuse it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from services import VERSION
from tests.support.cluster import (
    NO_STANDBYS,
    REPOSITORY,
    REQUEST_TIMEOUT_S,
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    free_port,
)

BUILD_TIMEOUT_S = 100.0
ANSWER = " city in Northern California that is known"
# Raises an error for whoever imports it instead of our package of that name.
DECOY = "raise ImportError('this is the package of somebody else')\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, made of a copy of the files that git knows or would add."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=BUILD_TIMEOUT_S)
    for name in filter(None, files.stdout.split("\0")):
        if (REPOSITORY / name).is_file() and not name.startswith("tests/"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, source / name)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target), str(source))
    [file] = target.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a virtual environment with the wheel, with our dependencies, and with a stranger's `services`."""
    directory = tmp_path_factory.mktemp("environment")
    venv.create(directory, with_pip=False, symlinks=True)
    python = directory / "bin" / "python"
    pip("--python", str(python), "install", "--no-deps", "--no-index", "--no-compile", str(wheel))
    [packages] = directory.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    add_decoy(packages)
    return directory / "bin"


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr


def add_decoy(directory: Path) -> None:
    for name in ("services", "bench"):
        (directory / name).mkdir()
        (directory / name / "__init__.py").write_text(DECOY)


def run(environment: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [str(environment / "twostroke"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=REQUEST_TIMEOUT_S, check=False)


def test_the_wheel_adds_one_name_and_needs_what_the_requirements_say(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = Parser().parsestr(archive.read(f"twostroke-{VERSION}.dist-info/METADATA").decode())
    assert {name.partition("/")[0] for name in names} == {"twostroke", f"twostroke-{VERSION}.dist-info"}
    lines = [line.partition("#")[0].strip() for line in (REPOSITORY / "requirements.txt").read_text().splitlines()]
    needed = metadata.get_all("Requires-Dist") or []
    assert [each for each in needed if "extra ==" not in each] == [line for line in lines if line]
    extras = {"bench", "docs", "gguf", "kv-events", "modelscope", "ray", "tensorrt"}
    assert set(metadata.get_all("Provides-Extra") or []) == extras
    assert 'httpx2==2.16.2; extra == "bench"' in needed
    assert any(each.startswith("tensorrt") for each in needed) and any(each.startswith("onnx==") for each in needed)


def test_every_file_of_the_services_is_in_the_wheel(wheel: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "services"], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=20
    )
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    kept = [name for name in listed.stdout.split("\0") if name and (REPOSITORY / name).exists()]
    assert len(kept) > 500
    assert not [name for name in kept if f"twostroke/{name}" not in names]


def test_the_installed_command_serves_in_a_directory_with_other_packages(environment: Path, tmp_path: Path) -> None:
    add_decoy(tmp_path)
    address, http_address = (f"127.0.0.1:{free_port()}" for _ in range(2))
    settings = [f"gateway.address={address}", f"gateway.http_address={http_address}", *NO_STANDBYS]
    command = [str(environment / "twostroke"), "serve", *(word for each in settings for word in ("--set", each))]
    log_file = tmp_path / "log"
    with log_file.open("wb") as log, (tmp_path / "stdout").open("wb") as stdout:
        clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
        server = subprocess.Popen(command, cwd=tmp_path, stdout=stdout, stderr=log, env=clean, start_new_session=True)
    try:
        wait_ready(server, http_address, log_file)
        assert completion(http_address) == ANSWER
        with urllib.request.urlopen(f"http://{http_address}/", timeout=REQUEST_TIMEOUT_S) as page:
            assert b"<html" in page.read()
        flags = ("--address", address, "--prompt", "San Francisco is a", "--max-tokens", "7")
        chat = run(environment, "chat", *flags, cwd=tmp_path)
        assert (chat.stdout, chat.returncode) == (f"{ANSWER}\n", 0), chat.stderr
        flags = ("--address", address, "--num-prompts", "3", "--input-len", "8", "--output-len", "4")
        bench = run(environment, "bench", *flags, cwd=tmp_path)
        assert bench.returncode == 0 and "TTFT" in bench.stdout, bench.stderr
        assert not (tmp_path / "stdout").read_bytes(), "that is for answers"
        assert f"one answer: twostroke chat --address {address} " in log_file.read_text()
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(STOP_TIMEOUT_S) == 0


def wait_ready(server: subprocess.Popen[bytes], http_address: str, log_file: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        assert server.poll() is None and time.monotonic() < deadline, log_file.read_text()
        try:
            with urllib.request.urlopen(f"http://{http_address}/ready", timeout=REQUEST_TIMEOUT_S):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)


def completion(http_address: str) -> str:
    body = {"model": "tiny-llama", "prompt": "San Francisco is a", "max_tokens": 7, "temperature": 0}
    request = urllib.request.Request(
        f"http://{http_address}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
        return json.load(response)["choices"][0]["text"]


def test_the_installed_command_knows_its_version_and_finds_no_server_to_control(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert run(environment, "--version", cwd=tmp_path).stdout == f"twostroke {VERSION}\n"
    status = run(environment, "ctl", "status", cwd=tmp_path)
    assert status.returncode == 3 and status.stderr.startswith("twostroke ctl: no launcher runs here")
