"""Reads the stages of a Dockerfile and their instructions."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.cluster import REPOSITORY

DOCKERFILE = REPOSITORY / "deploy" / "docker" / "Dockerfile"


@dataclass
class Stage:
    """One `FROM ... AS name`. Its instructions begin with those of the stages that it is built on."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [arguments for name, arguments in self.instructions if name == instruction]

    def last(self, instruction: str) -> str:
        return self.all(instruction)[-1]

    def exec_form(self, instruction: str) -> list[str]:
        """The JSON list of ENTRYPOINT, CMD or HEALTHCHECK. Fails for the shell form, which has no list."""
        return json.loads(self.last(instruction).partition("[")[1] + self.last(instruction).partition("[")[2])

    def environment(self) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S+)", " ".join(self.all("ENV"))))


def read_stages(file: Path = DOCKERFILE) -> dict[str, Stage]:
    stages: dict[str, Stage] = {}
    text = "".join(line for line in file.read_text().splitlines(keepends=True) if not line.startswith("#"))
    stage = None
    for line in text.replace("\\\n", " ").splitlines():
        name, _, arguments = line.strip().partition(" ")
        if name == "FROM":
            base, _, own = arguments.partition(" AS ")
            stage = Stage(own, base)
            if base in stages:
                stage.instructions += stages[base].instructions
            stages[own] = stage
        elif name:
            assert stage is not None, line
            stage.instructions.append((name, arguments.strip()))
    return stages
