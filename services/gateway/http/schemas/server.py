"""What GET answers: models, health, version."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict


class ModelObject(TypedDict):
    """The served model; `vocab_size` is the number of its token ids."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    vocab_size: int


class ModelList(TypedDict):
    """All of them: one."""

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
