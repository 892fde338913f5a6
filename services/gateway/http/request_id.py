"""x-request-id: the client's id, or a new one. It is on every answer and names the request in all logs."""

from __future__ import annotations

import re
import secrets

from starlette.types import Scope

from services.common.errors import InvalidRequest

REQUEST_ID_HEADER = "x-request-id"
ANTHROPIC_HEADER = "request-id"  # a second name, where Anthropic's client looks for the id
MAX_CHARACTERS = 100  # a request with several prompts appends a number, and the gateway's limit is 128
_VALID = re.compile(rb"[\x21-\x7e]{1,%d}" % MAX_CHARACTERS)


def new_request_id() -> str:
    """A new random id."""
    return secrets.token_hex(12)


def read_request_id(scope: Scope) -> str:
    """The client's id, or a new one. Raises `InvalidRequest` unless it is short printable ASCII without spaces."""
    name = REQUEST_ID_HEADER.encode()
    given = [value for key, value in scope["headers"] if key == name]
    if not given:
        return new_request_id()
    if len(given) > 1:
        raise InvalidRequest(f"{REQUEST_ID_HEADER} is given {len(given)} times, must be given once", REQUEST_ID_HEADER)
    if not _VALID.fullmatch(given[0]):
        raise InvalidRequest(
            f"{REQUEST_ID_HEADER} has {len(given[0])} bytes, must be 1 to {MAX_CHARACTERS} printable ASCII characters "
            "without spaces",
            REQUEST_ID_HEADER,
        )
    return given[0].decode()
