"""Reads a compose file as compose itself does: merges included files and replaces variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.support.cluster import REPOSITORY

DEPLOY = REPOSITORY / "deploy"
COMPOSE_FILES = ["compose.yaml", "compose.cuda.yaml"]
LOCKS = ["compose.keys.yaml", "compose.tls.yaml"]  # used together with one of the files above, by a second -f


def load_compose(file: str, variables: Mapping[str, str] | None = None, beside: str | None = None) -> dict[str, Any]:
    """The merged `deploy/FILE`, as `docker compose config` would show it. `beside` is the file of a second -f."""
    model = yaml.safe_load(interpolate((DEPLOY / file).read_text(), variables or {}))
    for included in model.get("include", []):
        for section, entries in load_compose(included, variables).items():
            if isinstance(entries, dict):
                model.setdefault(section, {}).update(entries)
    if beside is not None:
        other = load_compose(beside, variables)
        for name, service in other.pop("services").items():
            assert service.keys() <= {"command", "secrets"}, "only these two can be merged here"
            model["services"][name].update(service)
        model.update(other)
    return model


def interpolate(text: str, variables: Mapping[str, str]) -> str:
    """Replaces `${NAME:-default}` and `${NAME:+instead}`, also where one contains another.

    Leaves variables without a default as they are; a test finds them.
    """

    def value(match: re.Match[str]) -> str:
        given = variables.get(match["name"], "")
        return given or match["word"] if match["operator"] == "-" else given and match["word"]

    innermost = re.compile(r"\$\{(?P<name>\w+):(?P<operator>[-+])(?P<word>[^${}]*)\}")
    while innermost.search(text):
        text = innermost.sub(value, text)
    return text


def mount(service: Mapping[str, Any], target: str) -> str | None:
    """The volume's name or path of the host that is mounted at `target`."""
    for volume in service.get("volumes", []):
        if isinstance(volume, dict):
            if volume["target"] == target:
                return volume["source"]
        elif volume.split(":")[1] == target:
            return volume.split(":")[0]
    return None


def seconds(duration: str) -> float:
    """The seconds of a duration such as 90s or 2m."""
    return float(duration[:-1]) * {"s": 1, "m": 60}[duration[-1]]


def config_file(model: Mapping[str, Any], service: Mapping[str, Any]) -> tuple[Path, str]:
    """The config file of a service: its file on the host, and its path in the container."""
    [config] = service["configs"]
    return DEPLOY / model["configs"][config["source"]]["file"], config["target"]
