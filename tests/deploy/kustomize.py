"""Reads the Kubernetes manifests: single files, and overlays merged by Kustomize, if that is installed."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.compose_file import DEPLOY

KUBERNETES = DEPLOY / "kubernetes"
BASE = KUBERNETES / "base"
OVERLAYS = ["cpu", "cuda", "replicas", "secure"]
COMPONENTS = ["api-keys", "tls"]
RENDER_TIMEOUT_S = 60.0

Manifest = dict[str, Any]


def manifests_of(path: Path) -> list[Manifest]:
    """All documents of one file."""
    return list(yaml.safe_load_all(path.read_text()))


def rendered(overlay: str) -> dict[str, Manifest]:
    """The manifests that `kubectl apply -k` would send, by kind and name. Skips the test without a program for it."""
    if shutil.which("kustomize"):
        command = ["kustomize", "build"]
    elif shutil.which("kubectl"):
        command = ["kubectl", "kustomize"]
    else:
        pytest.skip("neither kustomize nor kubectl is installed")
    manifests = yaml.safe_load_all(_render(*command, str(KUBERNETES / "overlays" / overlay)))
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in manifests}


@functools.cache
def _render(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=RENDER_TIMEOUT_S)
    assert result.returncode == 0, result.stderr
    return result.stdout


def containers_of(deployment: Manifest) -> dict[str, Manifest]:
    """The containers by name, in the order in which they start."""
    pod = deployment["spec"]["template"]["spec"]
    return {each["name"]: each for each in (*pod.get("initContainers", []), *pod["containers"])}
