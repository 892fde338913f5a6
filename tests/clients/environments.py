"""`python -m tests.clients.environments`: installs the clients under test, each group in an environment of its own.

With arguments it installs these groups: `ray` is installed by `make ray` alone, for its tests take minutes.

The environments are in `.clients/` of the repository and are created again when their pins change. If a group cannot
be installed, for example without a network, standard error names it and its tests are skipped.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.cluster import REPOSITORY

ROOT = REPOSITORY / ".clients"
PINS = Path(__file__).parent
INSTALL_TIMEOUT_S = 600.0
INSTALLED = "installed"  # name of the file that marks a complete installation
# litellm and openai-agents need an older openai each; guidellm installs torch
PYTHON_GROUPS = [
    "agents", "anthropic", "litellm", "guidellm", "mistral", "ollama", "openai-agents", "triton", "vectors",
]
NODE = "node"


class Environment:
    """The environment of one group: its pins, and the directory in which they are installed."""

    def __init__(self, group: str) -> None:
        self.group = group
        names = ["package.json", "package-lock.json"] if group == NODE else [f"requirements-{group}.txt"]
        self.pins = [PINS / name for name in names]
        digest = hashlib.sha256(b"".join(file.read_bytes() for file in self.pins)).hexdigest()[:12]
        self.directory = ROOT / f"{group}-{digest}"

    @property
    def is_installed(self) -> bool:
        return (self.directory / INSTALLED).exists()

    def program(self, name: str) -> str:
        """The path of a program in the environment of a Python group."""
        return str(self.directory / "bin" / name)

    def install(self) -> None:
        """Installs the group if necessary. Raises `OSError`, `CalledProcessError` or `TimeoutExpired`,
        and leaves nothing then.
        """
        if self.is_installed:
            return
        for leftover in ROOT.glob(f"{self.group}-*"):
            shutil.rmtree(leftover)
        try:
            self._install()
        except BaseException:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise
        (self.directory / INSTALLED).touch()

    def _install(self) -> None:
        if self.group == NODE:
            self.directory.mkdir(parents=True)
            for file in self.pins:
                shutil.copy(file, self.directory)
            _run(["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"], self.directory)
        else:
            # A copy of the program could not be started while another thread forks: its file may still be open there.
            venv.create(self.directory, with_pip=True, symlinks=True)
            [pins] = self.pins
            pip = [self.program("python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
            _run([*pip, "install", "--no-compile", "--requirement", str(pins)], self.directory)


def environments() -> list[Environment]:
    """The environments whose tools this machine has."""
    groups = PYTHON_GROUPS + ([NODE] if shutil.which("npm") else [])
    return [Environment(group) for group in groups]


def main() -> None:
    named = [Environment(group) for group in sys.argv[1:]]
    with ThreadPoolExecutor() as threads:
        list(threads.map(_install, named or environments()))


def _install(environment: Environment) -> None:
    start = time.monotonic()
    try:
        environment.install()
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired, OSError) as error:
        output = getattr(error, "stderr", None) or b""
        reason = output.decode(errors="replace").strip().splitlines()[-1:] or [str(error)]
        print(f"clients {environment.group}: not installed: {reason[0]}", file=sys.stderr)
    else:
        print(f"clients {environment.group}: installed, {time.monotonic() - start:.0f} s", file=sys.stderr)


def _run(command: list[str], directory: Path) -> None:
    subprocess.run(command, cwd=directory, check=True, capture_output=True, timeout=INSTALL_TIMEOUT_S)


if __name__ == "__main__":
    main()
