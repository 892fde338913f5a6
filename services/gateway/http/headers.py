"""The headers of requests. One is x-request-id: the client's id, or a new one, which names the request in all logs.

It is on every answer. As with vLLM, a body may have it as `request_id`; the header wins.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from starlette.types import Scope

from services.common.errors import InvalidRequest

REQUEST_ID_HEADER = "x-request-id"
ANTHROPIC_HEADER = "request-id"  # a second name, where Anthropic's client looks for the id
MAX_CHARACTERS = 100  # a request with several prompts appends a number, and the gateway's limit is 128
MAX_CHARACTERS_OF_BODY = 115  # it may have been made of a header's, as chatcmpl-ID-NUMBER
_NAME = REQUEST_ID_HEADER.encode()
_PRINTABLE = re.compile(rb"[\x21-\x7e]+")


def header_values(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    """All values of a header in their order. `name`: in lower case, as ASGI has them."""
    return [value for key, value in headers if key == name]


def new_request_id() -> str:
    """A new random id."""
    return os.urandom(12).hex()


def read_request_id(scope: Scope) -> str:
    """The client's id, or a new one. Raises `InvalidRequest` unless it is short printable ASCII without spaces."""
    given = _in_headers(scope)
    if not given:
        return new_request_id()
    if len(given) > 1:
        raise InvalidRequest(f"{REQUEST_ID_HEADER} is given {len(given)} times, must be given once", REQUEST_ID_HEADER)
    if fault := fault_in(given[0], MAX_CHARACTERS):
        raise InvalidRequest(f"{REQUEST_ID_HEADER} {fault}", REQUEST_ID_HEADER)
    return given[0].decode()


def name_by_body(scope: Scope, given: str | None) -> None:
    """Names the request by its body's valid `request_id`, unless the header has named it."""
    if given is not None and not _in_headers(scope):
        scope["state"]["request_id"] = given


def fault_in(request_id: bytes, most: int) -> str | None:
    """What keeps a client from naming its request so, if anything does."""
    if len(request_id) <= most and _PRINTABLE.fullmatch(request_id):
        return None
    return f"has {len(request_id)} bytes, must be 1 to {most} printable ASCII characters without spaces"


def _in_headers(scope: Scope) -> list[bytes]:
    return header_values(scope["headers"], _NAME)
