"""The web page to try the server at /, with its content security policy, and the figures for its live view at /stats.

The policy allows only the page's own style and script, identified by their hashes, and only requests to this server.
Scripts may not write markup (Trusted Types), so a model's answer can never become part of the page's code.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response
from typing_extensions import TypedDict

from services.gateway.core.request_service import RequestService
from services.gateway.link.worker_load import CacheLoad, RequestLoad, ServiceLoad, WorkerLoad

FOLDER = Path(__file__).with_name("web_page")


class Stats(TypedDict):
    """The current figures, at most a second old."""

    model: str
    unready_reason: str | None
    requests: RequestLoad | None
    kv_cache: CacheLoad | None
    services: tuple[ServiceLoad, ...] | None


def page_routes(service: RequestService, worker_load: WorkerLoad) -> APIRouter:
    """The routes of one gateway's web page."""
    router = APIRouter(tags=["Page"])
    page = load_page()

    @router.get("/", include_in_schema=False)
    async def get_page() -> Response:
        return Response(page.body, headers=page.headers)

    @router.get("/stats")
    async def stats() -> Stats:
        """How busy the server is. What a worker or the launcher does not answer is null."""
        load = await worker_load.read()
        return {
            "model": service.names.first,
            "unready_reason": service.unready_reason(),
            "requests": load.requests,
            "kv_cache": load.kv_cache,
            "services": load.services,
        }

    return router


@dataclass(frozen=True, slots=True)
class Page:
    """The answer to `GET /`."""

    body: bytes
    headers: dict[str, str]


def load_page() -> Page:
    """Reads the page's files and puts them into one. Called once, at start."""
    body = re.sub(rb"/\* include (.+) \*/\n", _included, (FOLDER / "page.html").read_bytes())
    policy = {
        "default-src": "'none'",
        "script-src": _hash_of(body, "script"),
        "style-src": _hash_of(body, "style"),
        "img-src": "data:",  # the icon
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return Page(
        body,
        {
            "content-type": "text/html; charset=utf-8",
            "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
            "cache-control": "no-cache",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        },
    )


def _included(match: re.Match[bytes]) -> bytes:
    return (FOLDER / match[1].decode()).read_bytes()


def _hash_of(body: bytes, tag: str) -> str:
    """The source expression that allows the page's only element `tag` (CSP Level 3, section 2.3.1)."""
    (content,) = re.findall(rb"<%s>(.*?)</%s>" % (tag.encode(), tag.encode()), body, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"
