"""`PictureSources`: the bytes of pictures, which messages have as bytes, as data URLs, or as URLs elsewhere.

Other URLs are off unless `gateway.image_hosts` names their hosts. A host's name is resolved once, and the connection
goes to an address that was found, so that it cannot mean another machine a moment later. Addresses that are not public
are refused, whatever their names, also behind redirects; proxies of the environment are not used. Event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import socket
from collections.abc import Callable
from typing import NamedTuple, TypeVar
from urllib.parse import urljoin, urlsplit

import httpx2

from services.common.config import GatewaySection
from services.common.errors import ConfigError, InvalidRequest
from services.common.shorten import quote
from services.gateway.resources.base64_text import decode_base64
from services.gateway.resources.heavy_work import MAX_INLINE_BYTES
from services.pb import gateway_pb2

ALL = "*"  # in gateway.image_hosts
MAX_REDIRECTS = 3
MAX_URL_CHARACTERS = 4096
_DATA, _BASE64 = "data:", ";base64"
_PORTS = {"https": 443, "http": 80}
_REDIRECTS = (301, 302, 303, 307, 308)
_FIELD = "messages"

T = TypeVar("T", str, bytes)


class PictureFile(NamedTuple):
    """A picture as a client sends it."""

    data: bytes
    hash: bytes  # of the data

    @classmethod
    def of(cls, data: bytes) -> PictureFile:
        """Hashing takes a millisecond per MB: for much data it is called in a thread."""
        return cls(data, hashlib.sha256(data).digest())


class PictureSources:
    """Used in the event loop."""

    def __init__(self, section: GatewaySection) -> None:
        """Raises `ConfigError` for a host in `gateway.image_hosts` that cannot exist."""
        try:
            self._hosts = frozenset(_in_ascii(host.lower().strip("[]")) for host in section.image_hosts)
        except UnicodeError as error:
            raise ConfigError(f"gateway.image_hosts is {list(section.image_hosts)!r}: {error}") from error
        self._timeout_s = section.image_timeout_s
        self._max_bytes = section.max_image_bytes

    async def read(self, picture: gateway_pb2.MessagePicture) -> PictureFile:
        """The file. Raises `InvalidRequest` if there is none, if it is too large, or if it may not be fetched."""
        if picture.data and picture.url:
            raise InvalidRequest("a picture has bytes and a URL, of which it may have one", _FIELD)
        file = await (self._read_url(picture.url) if picture.url else _run(PictureFile.of, picture.data))
        if not file.data:
            raise InvalidRequest("a picture has no bytes", _FIELD)
        if len(file.data) > self._max_bytes:
            raise self._too_large(len(file.data))
        return file

    async def _read_url(self, url: str) -> PictureFile:
        if url[: len(_DATA)].lower() == _DATA:
            return await _decode(url)
        if len(url) > MAX_URL_CHARACTERS:
            raise InvalidRequest(
                f"the URL of a picture has {len(url)} characters, at most {MAX_URL_CHARACTERS} allowed", _FIELD
            )
        try:
            async with asyncio.timeout(self._timeout_s):
                return await _run(PictureFile.of, await self._fetch(url))
        except TimeoutError:
            raise InvalidRequest(
                f"{quote(url)} has not been fetched within {self._timeout_s:g} s (gateway.image_timeout_s)", _FIELD
            ) from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise InvalidRequest(f"{quote(url)} cannot be fetched: {type(error).__name__}", _FIELD) from error

    async def _fetch(self, url: str) -> bytes:
        """Follows redirects, each of which is checked as the URL itself is."""
        for _ in range(1 + MAX_REDIRECTS):
            host, port = self._check(url)
            address = await _resolve(host, port)
            # The request is for the host's name, which TLS checks, too; the connection goes to the address.
            netloc = f"[{address}]" if ":" in address else address
            parts = urlsplit(url)
            target = parts._replace(netloc=f"{netloc}:{port}", fragment="").geturl()
            async with (
                httpx2.AsyncClient(trust_env=False, follow_redirects=False, timeout=self._timeout_s) as client,
                client.stream(
                    "GET",
                    target,
                    headers={"host": host if port == _PORTS[parts.scheme] else f"{host}:{port}"},
                    extensions={"sni_hostname": host},
                ) as response,
            ):
                if response.status_code not in _REDIRECTS:
                    return await self._body_of(response, url)
                url = _follow(url, response.headers.get("location", ""))
        raise InvalidRequest(f"{quote(url)} is behind more than {MAX_REDIRECTS} redirects", _FIELD)

    async def _body_of(self, response: httpx2.Response, url: str) -> bytes:
        if response.status_code != 200:
            raise InvalidRequest(f"{quote(url)} cannot be fetched: it answers {response.status_code}", _FIELD)
        body = bytearray()
        async for piece in response.aiter_bytes():
            body += piece
            if len(body) > self._max_bytes:
                raise self._too_large(len(body))
        return bytes(body)

    def _check(self, url: str) -> tuple[str, int]:
        """The host and the port of a URL that may be fetched."""
        try:
            parts = urlsplit(url)
            host, port = _in_ascii((parts.hostname or "").lower()), parts.port
        except ValueError as error:
            raise InvalidRequest(f"{quote(url)} is no URL: {error}", _FIELD) from error
        if parts.scheme not in _PORTS:
            raise InvalidRequest(
                f"{quote(url)} has the scheme {quote(parts.scheme)}, must be data, https or http", _FIELD
            )
        if host not in self._hosts and ALL not in self._hosts:
            raise InvalidRequest(
                f"pictures of the host {quote(host)} are not fetched: gateway.image_hosts does not name it", _FIELD
            )
        if parts.username is not None or parts.password is not None:
            raise InvalidRequest("the URL of a picture has a user name or password", _FIELD)
        return host, port or _PORTS[parts.scheme]

    def _too_large(self, num_bytes: int) -> InvalidRequest:
        return InvalidRequest(
            f"a picture has {num_bytes} bytes or more, gateway.max_image_bytes is {self._max_bytes}", _FIELD
        )


def _follow(url: str, location: str) -> str:
    """Where a redirect leads. Raises `InvalidRequest` for what is no URL."""
    try:
        return urljoin(url, location)
    except ValueError as error:
        message = f"{quote(url)} redirects to {quote(location)}, which is no URL: {error}"
        raise InvalidRequest(message, _FIELD) from error


def _in_ascii(host: str) -> str:
    """A host's name as DNS has it. Raises `UnicodeError`, a `ValueError`, for names that it cannot have."""
    return host if host == ALL or ":" in host else host.encode("idna").decode()


async def _resolve(host: str, port: int) -> str:
    """The first address of a host. Raises `InvalidRequest` unless all of them are public."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # ValueError: no name can be like this
        raise InvalidRequest(f"the host {quote(host)} is not found: {error}", _FIELD) from error
    addresses = [str(entry[4][0]) for entry in found]
    for each in addresses:
        if not is_public(each):
            raise InvalidRequest(f"the host {quote(host)} has the address {each}, which is not public", _FIELD)
    return addresses[0]


def is_public(address: str) -> bool:
    """Whether an IP address belongs to a machine on the internet, also if it is one within another, such as 6to4.

    What an IPv6 address of a retired or reserved kind means depends on the machine (::/96 was IPv4): it is none.
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo and found.teredo[1])
        if inner:
            return is_public(str(inner))
        if found in ipaddress.ip_network("64:ff9b::/96"):  # NAT64
            return is_public(str(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)))
        if found.is_site_local or found.is_reserved:  # ::/96 is reserved
            return False
    return found.is_global and not found.is_multicast


async def _decode(url: str) -> PictureFile:
    """What a data URL has."""
    head, comma, text = url.partition(",")
    if not comma or not head.lower().endswith(_BASE64):
        raise InvalidRequest("a data URL of a picture must begin with data:image/...;base64,", _FIELD)
    return await _run(lambda text: PictureFile.of(decode_base64(text, _FIELD)), text)


async def _run(function: Callable[[T], PictureFile], given: T) -> PictureFile:
    """`function(given)`, in a thread if much is given."""
    return function(given) if len(given) <= MAX_INLINE_BYTES else await asyncio.to_thread(function, given)
