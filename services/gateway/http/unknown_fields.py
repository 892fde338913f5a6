"""Warns of fields that requests have and this server does not know, such as a misspelt one: of each once an hour.

Each class of routes that `json_route` makes has one of these. It remembers and logs a bounded number of names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import structlog
from fastapi import Request

from services.common.nearest import nearest
from services.common.shorten import quote, shorten

log = structlog.get_logger()

MAX_WARNINGS = 64  # of a period: a client's many names hide those of others no longer than that
PERIOD_S = 3600.0
MAX_WARNINGS_PER_REQUEST = 3  # looking for similar names may take a millisecond for each
MAX_NAME_CHARACTERS = 60


class UnknownFields:
    """Which ones were logged in this period, by path."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str]] = set()
        self._since_s = time.monotonic()

    def log(self, request: Request, unknown: Sequence[str], known: Callable[[], Iterable[str]]) -> None:
        """Logs the names of a request's ignored fields: new ones as warnings, all of them at level debug."""
        path = _printable(request.scope["path"])
        request_id: str = request.scope["state"]["request_id"]
        names = list(dict.fromkeys(_printable(name) for name in unknown))
        if time.monotonic() - self._since_s >= PERIOD_S:
            self._logged, self._since_s = set(), time.monotonic()
        new = [name for name in names if (path, name) not in self._logged][:MAX_WARNINGS_PER_REQUEST]
        for name in new[: MAX_WARNINGS - len(self._logged)]:
            self._logged.add((path, name))
            meant = nearest(name, known())
            hint = {} if meant is None else {"did_you_mean": meant}
            log.warning("unknown field ignored", path=path, field=name, **hint, request_id=request_id)
            if len(self._logged) == MAX_WARNINGS:
                log.warning("no more warnings of unknown fields for now", path=path, num_warnings=MAX_WARNINGS)
        log.debug("unknown fields ignored", request_id=request_id, num_fields=len(names), fields=",".join(names[:20]))


def _printable(text: str) -> str:
    """A client's text without characters that a terminal would obey."""
    return shorten(quote(text)[1:-1], MAX_NAME_CHARACTERS)
