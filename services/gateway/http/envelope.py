"""The checks around every request: its id, its Host and Origin, and the size of its body."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Sequence
from typing import NamedTuple

import structlog
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.config import GatewaySection
from services.common.errors import InvalidRequest, PermissionDenied
from services.gateway.http.errors import Dialect, error_response
from services.gateway.http.headers import REQUEST_ID_HEADER, header_values, new_request_id, read_request_id
from services.rpc.tls import is_exposed

log = structlog.get_logger()

MAX_BODY_BYTES = 2 * 2**20
# A photo of 12 MB in base64. No more, because the event loop parses a body in one go, hostile ones at 150 MB/s.
MAX_BODY_BYTES_WITH_PICTURES = 16 * 2**20
FORM_BYTES = 2**16  # of the fields of a form beside its file
UPLOADS = ("/v1/audio/",)  # routes that take forms with files
FORM_TYPE = "multipart/form-data"
DEFAULT_PORTS = {"http": ":80", "https": ":443"}
MAX_QUOTED = 80  # characters of a wrong value in an error


def fit_bodies(section: GatewaySection, *, sees_pictures: bool) -> GatewaySection:
    """The section with `max_body_bytes` for the model, if it has none."""
    if section.max_body_bytes is not None:
        return section
    return section.model_copy(
        update={"max_body_bytes": MAX_BODY_BYTES_WITH_PICTURES if sees_pictures else MAX_BODY_BYTES}
    )


class _Limit(NamedTuple):
    """Of a body."""

    num_bytes: int
    key: str  # of the configuration


class Envelope:
    """An ASGI middleware. Handlers find the id as `request.state.request_id`."""

    def __init__(self, app: ASGIApp, section: GatewaySection, dialects: Sequence[Dialect]) -> None:
        assert section.max_body_bytes is not None, "`fit_bodies` has set it"
        self._app = app
        self._dialects = dialects
        self._root_path = section.root_path
        self._host_check = HostCheck(section)
        self._limit = _Limit(section.max_body_bytes, "gateway.max_body_bytes")
        # Of a form with a file, if that is more.
        self._form_limit = max(self._limit, _Limit(section.max_audio_bytes + FORM_BYTES, "gateway.max_audio_bytes"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises nothing: the handlers of `services.gateway.http.errors` have already answered every error."""
        assert scope["type"] == "http", "uvicorn is configured for HTTP only"
        scope = self._as_served(scope)
        refusal: Exception | None = None
        try:
            request_id = read_request_id(scope)
        except InvalidRequest as error:
            request_id, refusal = new_request_id(), error
        scope["state"]["request_id"] = request_id
        scope["state"]["dialects"] = self._dialects
        further = [name for each in self._dialects if (name := each.request_id_header) and each.is_meant(scope)]
        state = scope["state"]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                final_id: str = state["request_id"]  # a body may have named the request
                id_headers = [(name.encode(), final_id.encode()) for name in (REQUEST_ID_HEADER, *further)]
                message["headers"] = [*message.get("headers", ()), *id_headers]
            await send(message)

        limit = self._form_limit if _has_upload(scope) else self._limit
        refusal = refusal or self._host_check.refuse(scope["headers"]) or _refuse_length(scope, limit)
        if refusal is not None:
            await error_response(refusal, scope)(scope, receive, send_with_id)
            return
        try:
            await self._app(scope, _limited(receive, limit), send_with_id)
        except Exception as error:
            log.debug("request ended by an error", request_id=state["request_id"], error=repr(error))

    def _as_served(self, scope: Scope) -> Scope:
        """The request without the prefix of paths that a proxy passes on; a path without it stays as it is.

        HEAD is answered wherever GET is (RFC 9110, section 9.3.2), since many probes send it: the application sees a
        GET, and uvicorn, which knows the real method, sends no body.
        """
        path: str = scope["path"]
        if self._root_path and f"{path}/".startswith(f"{self._root_path}/"):
            scope = {**scope, "path": path.removeprefix(self._root_path) or "/"}
        return {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope


def media_type_of(scope: Scope) -> str:
    """The type of a body, in lower case and without parameters; empty if the request names none."""
    types = header_values(scope["headers"], b"content-type")
    return types[0].decode("latin-1").partition(";")[0].strip().lower() if types else ""


def _has_upload(scope: Scope) -> bool:
    return scope["path"].startswith(UPLOADS) and media_type_of(scope) == FORM_TYPE


def _refuse_length(scope: Scope, limit: _Limit) -> HTTPException | None:
    """The error for a body whose content-length is above the limit; the body is not read."""
    lengths = header_values(scope["headers"], b"content-length")
    if lengths and int(lengths[0]) > limit.num_bytes:  # the parser allows only digits and one such header
        return _too_large(f"{int(lengths[0])}", limit)
    return None


def _limited(receive: Receive, limit: _Limit) -> Receive:
    """Limits `receive` to the allowed size: a chunked body does not declare its length."""
    num_bytes = 0

    async def receive_limited() -> Message:
        nonlocal num_bytes
        message = await receive()
        if message["type"] == "http.request":
            num_bytes += len(message.get("body", b""))
            if num_bytes > limit.num_bytes:
                raise _too_large(f"more than {limit.num_bytes}", limit)
        return message

    return receive_limited


def _too_large(num_bytes: str, limit: _Limit) -> HTTPException:
    return HTTPException(413, f"the body has {num_bytes} bytes, the limit is {limit.num_bytes} ({limit.key})")


class HostCheck:
    """Protects a server without API keys from requests that foreign web pages send through a user's browser.

    A page of another site can send requests to this machine (cross-site request forgery). If the owner of a domain lets
    its name point to 127.0.0.1, the page can also read the answers (DNS rebinding). The `Origin` header reveals the
    first attack, the `Host` header the second. gRPC needs no check, since browsers cannot use it.
    """

    def __init__(self, section: GatewaySection) -> None:
        self._hosts = _allowed_hosts(section)
        self._origins = section.cors_origins

    def refuse(self, headers: Collection[tuple[bytes, bytes]]) -> PermissionDenied | None:
        """The error if the request's Host or Origin is foreign, else None."""
        found: dict[bytes, list[str]] = {b"host": [], b"sec-fetch-site": [], b"origin": []}
        for name, value in headers:
            if name in found:
                found[name].append(value.decode("latin-1"))
        hosts = found[b"host"]
        for host in hosts:
            if self._hosts is not None and not _is_local(name := _name_of(host)) and name not in self._hosts:
                return PermissionDenied(
                    f"the host {host[:MAX_QUOTED]!r} is not one of this machine's own names, nor one of "
                    "gateway.allowed_hosts",
                    "host",
                )
        is_same_origin = "same-origin" in found[b"sec-fetch-site"]  # a proxy may change Host
        for origin in found[b"origin"]:
            if "*" in self._origins or origin in self._origins or is_same_origin or _is_of_host(origin, hosts):
                continue
            return PermissionDenied(
                f"the origin {origin[:MAX_QUOTED]!r} is not this server's own, nor one of gateway.cors_origins",
                "origin",
            )
        return None


def _allowed_hosts(section: GatewaySection) -> frozenset[str] | None:
    """The allowed names in addition to local ones; None: all names are allowed.

    A server that other machines can reach has names that it does not know, so by default it allows all.
    """
    address = section.http_address
    is_local = not address.startswith("unix:") and not is_exposed(address)
    if "*" in section.allowed_hosts or not (section.allowed_hosts or is_local):
        return None
    own = () if address.startswith("unix:") else (_name_of(address),)
    return frozenset({*own, *(host.lower() for host in section.allowed_hosts)})


def _is_local(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _is_of_host(origin: str, hosts: Collection[str]) -> bool:
    """Whether the page comes from the host that it sends the request to; the schemes may differ behind a proxy."""
    scheme, _, address = origin.lower().partition("://")
    port = DEFAULT_PORTS.get(scheme, "")
    return bool(address) and address.removesuffix(port) in {host.lower().removesuffix(port) for host in hosts}


def _name_of(host: str) -> str:
    """The host name without port and trailing dot; an IPv6 address keeps its brackets."""
    if host.startswith("["):
        return host.partition("]")[0].lower() + "]"
    return host.partition(":")[0].lower().removesuffix(".")

