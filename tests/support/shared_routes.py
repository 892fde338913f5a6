"""Lets gateways share what FastAPI and pydantic find out about a route: 0.1 s of each gateway's start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any, get_args
from unittest.mock import MagicMock

import fastapi._compat.v2 as fastapi_fields
import fastapi.routing as fastapi_routing
from fastapi.dependencies.models import Dependant
from pydantic import ConfigDict, TypeAdapter

from services.common.config import GatewaySection
from services.gateway.apis import app

_TYPE_ADAPTERS: dict[tuple[object, str], TypeAdapter[Any]] = {}
_ROUTE_STATES: dict[tuple[object, str], list[tuple[object, dict[str, Any]]]] = {}
_values_of = attrgetter(*(each.name for each in fields(Dependant)))
_make_route_state = fastapi_routing._populate_api_route_state


def share_routes() -> None:
    """From now on all gateways of this process, and of those that it forks, share it."""
    fastapi_fields.TypeAdapter = _shared_type_adapter  # type: ignore[misc]
    fastapi_routing._populate_api_route_state = _share_route_state


def prepare_routes() -> None:
    """Finds it out now, for processes that are forked later."""
    parts = MagicMock()  # an application uses its parts only to answer requests
    parts.section = GatewaySection()
    app.build_app(parts, parts, parts, parts, parts, parts, parts, parts)


def _shared_type_adapter(annotated: Any, config: ConfigDict | None = None) -> TypeAdapter[Any]:
    """pydantic's adapter for the body or response of a route. It has no state; to make all of them takes 0.1 s."""
    if config is not None:  # the OpenAPI document has a few
        return TypeAdapter(annotated, config=config)
    annotation, *metadata = get_args(annotated)
    key = annotation, repr(metadata)
    if key not in _TYPE_ADAPTERS:
        _TYPE_ADAPTERS[key] = TypeAdapter(annotated)
    return _TYPE_ADAPTERS[key]


def _share_route_state(route: Any, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
    """Gives a route what FastAPI found out about one of another gateway with the same function, path and options.

    Both functions are closures of one text, whose annotations are equal.
    """
    provider = options.pop("dependency_overrides_provider", None)
    if options.get("dependencies"):
        return _make_route_state(route, path, endpoint, dependency_overrides_provider=provider, **options)
    # Annotations made for one gateway ask its model how to read a body.
    compared = options, endpoint.__defaults__, endpoint.__kwdefaults__, endpoint.__annotations__
    known = _ROUTE_STATES.setdefault((endpoint.__code__, path), [])
    state = next((state for others, state in known if others == compared), None)
    if state is None:
        _make_route_state(route, path, endpoint, dependency_overrides_provider=provider, **options)
        known.append((compared, {name: getattr(route, name) for name in fastapi_routing._APIRouteLike.__annotations__}))
        return None
    vars(route).update(state)
    route.endpoint = endpoint
    route.dependency_overrides_provider = provider
    route.dependant = Dependant(*_values_of(state["dependant"]))
    route.dependant.call = endpoint
    return None
