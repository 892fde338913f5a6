"""x-request-id: the client's if it sent one, else a new one; on every answer, and the request's name in all logs."""

from __future__ import annotations

import re
import secrets

from starlette.types import Scope

from services.common.errors import InvalidRequest

REQUEST_ID_HEADER = "x-request-id"
MAX_CHARACTERS = 100  # a request of several prompts adds a number, and 128 is what the gateway takes
_VALID = re.compile(rb"[\x21-\x7e]{1,%d}" % MAX_CHARACTERS)


def new_request_id() -> str:
    """One that nobody else has."""
    return secrets.token_hex(12)


def read_request_id(scope: Scope) -> str:
    """Of a request. Raises `InvalidRequest` if the client's is too long or is not printable ASCII without spaces."""
    name = REQUEST_ID_HEADER.encode()
    given = [value for key, value in scope["headers"] if key == name]
    if not given:
        return new_request_id()
    if len(given) > 1:
        raise InvalidRequest(f"{REQUEST_ID_HEADER} is there {len(given)} times, once is allowed", REQUEST_ID_HEADER)
    if not _VALID.fullmatch(given[0]):
        raise InvalidRequest(
            f"{REQUEST_ID_HEADER} has {len(given[0])} bytes, must be 1 to {MAX_CHARACTERS} printable ASCII characters "
            "without spaces",
            REQUEST_ID_HEADER,
        )
    return given[0].decode()
