"""FastAPI prepares a route when it is made, and no route once more for the first request."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import MagicMock

import fastapi.routing
import pytest
from starlette.routing import Match

from services.common.config import GatewaySection
from services.gateway.apis.app import build_app


def test_each_route_is_prepared_once_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, prepare = Counter[tuple[str, str]](), fastapi.routing._populate_api_route_state

    def note(route: Any, path: str, endpoint: Any, **options: Any) -> None:
        prepared[path, f"{options['methods']} {endpoint.__qualname__}"] += 1
        prepare(route, path, endpoint, **options)

    monkeypatch.setattr(fastapi.routing, "_populate_api_route_state", note)
    parts = MagicMock()
    parts.section = GatewaySection()
    app = build_app(parts, parts, parts, parts, parts, parts, parts, parts)
    for method, path in (("GET", "/health"), ("GET", "/v1/models/x"), ("POST", "/v2/models/ensemble/infer")):
        scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": [], "app": app}
        assert any(route.matches(scope)[0] is Match.FULL for route in app.router.routes)
    assert len(prepared) > 100 and {*prepared.values()} == {1}
