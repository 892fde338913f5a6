"""Answers about the server: health, load, version."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict


class Live(TypedDict):
    """The process answers."""

    status: Literal["ok"]


class Health(TypedDict):
    """Whether requests can run; if not, `reason` says why."""

    status: Literal["ok", "unavailable"]
    reason: NotRequired[str]


class Load(TypedDict):
    """Requests that one gateway process has accepted and not answered completely, those that wait included."""

    server_load: int


class Version(TypedDict):
    """The version of the server."""

    version: str
