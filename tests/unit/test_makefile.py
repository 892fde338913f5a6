"""What the targets of the Makefile install."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from tests.support.cluster import REPOSITORY

TIMEOUT_S = 20.0


def installed_by(target: str, directory: Path) -> set[str]:
    """The requirements files that a target would install in a fresh checkout."""
    for path in (REPOSITORY / "Makefile", *REPOSITORY.glob("requirements*.txt")):
        shutil.copy(path, directory)
    command = ["make", "--dry-run", target]
    found = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return set(re.findall(r"--requirement (\S+)", found.stdout))


def test_running_needs_no_package_of_development(tmp_path: Path) -> None:
    assert installed_by("run", tmp_path) == {"requirements.txt"}


def test_tests_install_all_packages(tmp_path: Path) -> None:
    assert installed_by("test", tmp_path) == {"requirements.txt", "requirements-dev.txt"}
