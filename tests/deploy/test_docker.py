"""The Dockerfile, as far as it can be judged without building it."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import quote

import pytest

from services import VERSION
from tests.deploy.dockerfile import DOCKERFILE, read_stages
from tests.support.cluster import REPOSITORY

TIMEOUT_S = 60.0

TARGETS = ["cpu", "cuda"]


def test_hadolint_has_no_complaint() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    result = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, "")


def test_a_build_fetches_no_frontend_from_a_registry() -> None:
    """Docker reads directives (`# name=value`) only in the comments before the first instruction."""
    head = itertools.takewhile(lambda line: line.startswith("#"), DOCKERFILE.read_text().splitlines())
    assert not [line for line in head if re.match(r"#\s*syntax\s*=", line, re.IGNORECASE)]


@pytest.mark.parametrize("target", TARGETS)
def test_a_final_image_runs_without_root_and_can_be_probed_and_stopped(target: str) -> None:
    stage = read_stages()[target]
    uid, gid = stage.last("USER").split(":")
    assert int(uid) > 0 and int(gid) > 0, "runAsNonRoot can check only numbers"
    assert stage.instructions[-1][0] == "USER", "the last instruction must be USER"
    assert stage.last("STOPSIGNAL") == "SIGTERM"
    assert stage.exec_form("ENTRYPOINT") == ["python", "-m"]
    assert stage.exec_form("CMD")[0] == "services.launch"
    assert stage.exec_form("HEALTHCHECK")[:3] == ["python", "-m", "services.rpc.probe"]


@pytest.mark.parametrize("target", TARGETS)
def test_the_labels_of_an_image_are_those_of_the_package(target: str) -> None:
    labels = dict(re.findall(r'org\.opencontainers\.image\.([\w.]+)="([^"]*)"', read_stages()[target].last("LABEL")))
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    expected = {"title": project["name"], "version": VERSION, "description": project["description"]}
    base = f"docker.io/library/{read_stages()['python'].base}"
    assert labels == expected | {"revision": "${REVISION}", "base.name": base}


def test_the_bill_of_materials_has_every_package_that_is_installed() -> None:
    command = [sys.executable, "-"]
    done = subprocess.run(
        command, input=(REPOSITORY / "deploy/docker/sbom.py").read_text(), cwd=REPOSITORY,
        capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
    )  # fmt: skip
    document = json.loads(done.stdout)
    assert (document["bomFormat"], document["metadata"]["component"]["version"]) == ("CycloneDX", VERSION)
    purls = [each["purl"] for each in document["components"]]
    assert len(set(purls)) == len(purls) and purls == [each["bom-ref"] for each in document["components"]]
    for line in (REPOSITORY / "requirements.txt").read_text().splitlines():
        if requirement := line.partition("#")[0].strip():
            name, _, version = requirement.partition("==")
            installed = importlib.metadata.version(name)
            assert f"pkg:pypi/{name}@{quote(installed)}" in purls and installed.partition("+")[0] == version
    if shutil.which("dpkg-query") is not None:
        assert any(purl.startswith("pkg:deb/debian/libc6@") for purl in purls)


@pytest.mark.parametrize("target", TARGETS)
def test_a_final_image_takes_files_from_other_stages_only(target: str) -> None:
    stages = read_stages()
    copies = [arguments.split() for arguments in stages[target].all("COPY")]
    assert [(source, destination) for _, source, destination in copies] == [
        ("/opt/venv", "/opt/venv"),
        ("/opt/twostroke", "/opt/twostroke"),
    ]
    assert all(origin.removeprefix("--from=") in stages for origin, _, _ in copies)
    assert "pip" not in " ".join(stages[target].all("RUN")), "packages must be installed in another stage"


def test_base_images_are_pinned() -> None:
    stages = read_stages()
    outside = {stage.base for stage in stages.values()} - stages.keys()
    assert outside
    for image in outside:
        assert re.fullmatch(r"[a-z/]+:\d+\.\d+\.\d+[-\w]*", image), image


def test_copied_files_exist_and_reach_the_builder() -> None:
    rules = (REPOSITORY / ".dockerignore").read_text().splitlines()
    assert rules[1] == "*", "files that are not named must stay out"
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    context = {
        source
        for stage in read_stages().values()
        for copy in stage.all("COPY")
        if not copy.startswith("--from")
        for source in copy.split()[:-1]
    }
    assert context == allowed
    assert all((REPOSITORY / source).exists() for source in context)


def test_the_cpu_flavour_installs_torch_for_the_cpu() -> None:
    stages = read_stages()
    [install] = stages["packages-cpu"].all("RUN")[-1:]
    assert '--extra-index-url "${TORCH_INDEX_URL}"' in install
    assert any(argument.endswith("/whl/cpu") for argument in stages["packages-cpu"].all("ARG"))
    assert "index-url" not in stages["packages-cuda"].all("RUN")[-1]
