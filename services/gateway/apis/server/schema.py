"""Answers about the server: models, health, load, version."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict


class ModelObject(TypedDict):
    """The served model under one of its names, or an adapter; `vocab_size` is the number of token ids.

    `root` is its directory. `parent` is the name of the model that an adapter belongs to, null for the model itself.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    vocab_size: int


class ModelList(TypedDict):
    """The served model under all its names, the first name first, then its adapters."""

    object: Literal["list"]
    data: list[ModelObject]


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
