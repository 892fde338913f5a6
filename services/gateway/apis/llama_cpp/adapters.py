"""llama.cpp's adapters: /lora-adapters lists them by number, and `lora` of a request names one of these.

An adapter is applied as it was trained or not at all, and one at a time: its scale is 1 or 0. None is applied where a
request names none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import pydantic
from fastapi import Request
from pydantic import Field
from typing_extensions import TypedDict

from services.common.errors import InvalidRequest
from services.gateway.adapters.adapter_list import MAX_ADAPTERS
from services.gateway.apis.shared.request_model import RequestModel, UInt32, at_most
from services.gateway.request.model_limits import ModelNames


class AdapterScale(RequestModel):
    """How much of an adapter is applied."""

    id: UInt32 = Field(description="Its number in /lora-adapters")
    scale: float = Field(description="0 or 1")


AdapterScales = Annotated[list[AdapterScale], at_most(MAX_ADAPTERS)]


class AdapterScalesBody(pydantic.RootModel[AdapterScales]):
    """The scales of requests that name no adapter; one that is missing is 0."""

    def name_request(self, request: Request) -> None:
        """Nothing: a list has no name."""

    def log_unknown_fields(self, request: Request) -> None:
        """Nothing: a list has no fields."""


class AdapterObject(TypedDict):
    """An adapter that the caller may use."""

    id: int
    name: str  # what `model` of a request may be
    path: str
    scale: float  # 0: it is not applied where a request does not name it


def list_adapters(names: ModelNames) -> list[AdapterObject]:
    """Those that a caller may use. Their numbers are those of their names in order, the same in every process."""
    numbered = enumerate(sorted(names.adapters))
    return [{"id": index, "name": name, "path": names.adapters[name].path, "scale": 0.0} for index, name in numbered]


def check_defaults(scales: Sequence[AdapterScale], names: ModelNames) -> None:
    """Raises `InvalidRequest` unless all scales are 0: what one client asks for is not applied to all."""
    if (adapter := named_adapter(scales, names)) is not None:
        raise InvalidRequest(
            f"scale of the adapter {adapter!r} is 1: none is applied to all requests, name it in each by lora or model",
            "scale",
        )


def named_adapter(scales: Sequence[AdapterScale], names: ModelNames) -> str | None:
    """The name of the adapter that is applied; None: there is none. Raises `InvalidRequest` for other scales."""
    known, applied = sorted(names.adapters), list[str]()
    for index, each in enumerate(scales):
        if each.id >= len(known):
            has = f"there are {len(known)} adapters, see /lora-adapters"
            raise InvalidRequest(f"lora[{index}].id is {each.id}: {has}", f"lora[{index}].id")
        if each.scale not in (0.0, 1.0):
            raise InvalidRequest(
                f"lora[{index}].scale is {each.scale:g}, must be 0 or 1: an adapter is applied as it was trained",
                f"lora[{index}].scale",
            )
        if each.scale:
            applied.append(known[each.id])
    if len(set(applied)) > 1:
        raise InvalidRequest(f"lora has {len(applied)} adapters of scale 1, at most 1 allowed", "lora")
    return applied[0] if applied else None
