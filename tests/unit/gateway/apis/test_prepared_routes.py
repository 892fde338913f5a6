"""What FastAPI prepares for the first request whose path it compares with those of all routes."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import fastapi.routing
import pytest
from starlette.routing import Match

from services.common.config import GatewaySection
from services.gateway.apis.app import build_app, prepare_routes


def test_routes_that_are_prepared_are_not_prepared_again_for_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = MagicMock()
    parts.section = GatewaySection()
    app = build_app(parts, parts, parts, parts, parts, parts, parts, parts)
    made = list[Any]()
    build = fastapi.routing._IncludedRouter._build_effective_context

    def noted(self: Any, route: Any) -> Any:
        made.append(route)
        return build(self, route)

    monkeypatch.setattr(fastapi.routing._IncludedRouter, "_build_effective_context", noted)
    prepare_routes(app)
    assert len(made) > 100, "FastAPI does so in another way: look whether this is still needed"
    made.clear()
    for method, path in (("GET", "/health"), ("GET", "/v1/models/x"), ("POST", "/v2/models/ensemble/infer")):
        scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": [], "app": app}
        assert any(route.matches(scope)[0] is Match.FULL for route in app.router.routes)
    assert not made
