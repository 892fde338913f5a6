"""Reads a compose file as compose itself does: included files merged, variables put in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.support.cluster import REPOSITORY

DEPLOY = REPOSITORY / "deploy"
COMPOSE_FILES = ["compose.yaml", "compose.cuda.yaml"]
LOCKS = ["compose.keys.yaml", "compose.tls.yaml"]  # given beside one of them, with a second -f


def load_compose(file: str, variables: Mapping[str, str] | None = None, beside: str | None = None) -> dict[str, Any]:
    """The whole model of `deploy/FILE`, as `docker compose config` would show it; `beside` is that of a second -f."""
    model = yaml.safe_load(interpolate((DEPLOY / file).read_text(), variables or {}))
    for included in model.get("include", []):
        for section, entries in load_compose(included, variables).items():
            if isinstance(entries, dict):
                model.setdefault(section, {}).update(entries)
    if beside is not None:
        other = load_compose(beside, variables)
        for name, service in other.pop("services").items():
            assert service.keys() <= {"command", "secrets"}, "the first is replaced, the second was not there"
            model["services"][name].update(service)
        model.update(other)
    return model


def interpolate(text: str, variables: Mapping[str, str]) -> str:
    """Puts in `${NAME:-default}` and `${NAME:+instead}`, which may lie in each other.

    A variable without either fails the test, for nobody needs to set any.
    """

    def value(match: re.Match[str]) -> str:
        given = variables.get(match["name"], "")
        return given or match["word"] if match["operator"] == "-" else given and match["word"]

    innermost = re.compile(r"\$\{(?P<name>\w+):(?P<operator>[-+])(?P<word>[^${}]*)\}")
    while innermost.search(text):
        text = innermost.sub(value, text)
    return text


def mount(service: Mapping[str, Any], target: str) -> str | None:
    """What is mounted at `target`: a volume's name or a path of the host."""
    for volume in service.get("volumes", []):
        if isinstance(volume, dict):
            if volume["target"] == target:
                return volume["source"]
        elif volume.split(":")[1] == target:
            return volume.split(":")[0]
    return None


def seconds(duration: str) -> float:
    """Of a duration such as 90s or 2m."""
    return float(duration[:-1]) * {"s": 1, "m": 60}[duration[-1]]


def config_file(model: Mapping[str, Any], service: Mapping[str, Any]) -> tuple[Path, str]:
    """The host's file and the container's path of a service's config."""
    [config] = service["configs"]
    return DEPLOY / model["configs"][config["source"]]["file"], config["target"]
