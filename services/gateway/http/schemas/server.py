"""What GET answers: models, health, version."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict


class ModelObject(TypedDict):
    """A name of the served model; `root` is the directory it comes from, `vocab_size` the number of its token ids."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    vocab_size: int


class ModelList(TypedDict):
    """All names of the served model, the first one first."""

    object: Literal["list"]
    data: list[ModelObject]


class Live(TypedDict):
    """The process answers."""

    status: Literal["ok"]


class Health(TypedDict):
    """Whether requests can run; if not, why."""

    status: Literal["ok", "unavailable"]
    reason: NotRequired[str]


class Version(TypedDict):
    """Of the server."""

    version: str
