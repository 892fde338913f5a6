"""Where pictures may come from: hosts that are not named, or not public, are never connected to."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from services.common.config import GatewaySection
from services.common.errors import ConfigError, InvalidRequest
from services.gateway.images import sources
from services.gateway.images.sources import PictureFile, PictureSources, is_public
from services.pb import gateway_pb2

FILE = b"\x89PNG no picture, but bytes"
Answer = Callable[[str], bytes]  # of a path


class LocalServer:
    """A server of HTTP on loopback, which counts its connections."""

    def __init__(self, answer: Answer) -> None:
        self.num_connections = 0
        self.hosts: list[str] = []
        self.port = 0
        self._answer = answer

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.hosts.append(next(line for line in head.splitlines() if line.lower().startswith("host:"))[5:].strip())
        writer.write(self._answer(head.split()[1]))
        await writer.drain()
        writer.close()


def ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[LocalServer]:
    local = LocalServer(answer)
    server = await asyncio.start_server(local.handle, "127.0.0.1", 0)
    local.port = server.sockets[0].getsockname()[1]
    async with server:
        yield local


async def read(url: str, **settings: object) -> bytes:
    section = GatewaySection.model_validate(settings)
    file = await PictureSources(section).read(gateway_pb2.MessagePicture(url=url))
    assert file == PictureFile.of(file.data)
    return file.data


def test_data_urls_and_bytes() -> None:
    url = f"data:image/png;base64,{base64.b64encode(FILE).decode()}"
    assert asyncio.run(read(url)) == FILE
    large = base64.b64encode(bytes(200_000)).decode()
    assert asyncio.run(read(f"DATA:image/png;base64,{large}")) == bytes(200_000)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png,abc", "must begin with data:image"),
        ("data:image/png;base64,%%%", "is not base64"),
        ("data:image/png;base64,", "has no bytes"),
        ("file:///etc/passwd", "scheme 'file'"),
        ("ftp://example.org/a.png", "scheme 'ftp'"),
        ("/a.png", "scheme ''"),
        ("https://example.org/a.png", "gateway.image_hosts does not name it"),
        ("https://example.com.evil.org/a.png", "gateway.image_hosts does not name it"),
        ("https://user:pw@example.com/a.png", "has a user name or password"),
        ("https://example.com:99999/a.png", "is no URL"),
        ("http://[::1/a.png", "is no URL"),
        ("http://a..b/x", "is no URL"),
        (f"http://{'a' * 70}.com/x", "is no URL"),
        ("https://example.com/" + "a" * 5000, "at most 4096"),
    ],
)
def test_what_is_refused_without_a_connection(url: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(*_: object) -> str:
        raise AssertionError("no name is resolved")

    monkeypatch.setattr(sources, "_resolve", resolve)
    with pytest.raises(InvalidRequest, match=message):
        asyncio.run(read(url, image_hosts=["example.com"]))


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "127.1", "2130706433", "0x7f.1"]
)
def test_loopback_is_never_connected_to_whatever_it_is_called(host: str) -> None:
    async def main() -> int:
        async with serving(lambda path: ok(FILE)) as local:
            with pytest.raises(InvalidRequest, match=r"not public|not found|cannot be fetched"):
                await read(f"http://{host}:{local.port}/a.png", image_hosts=[host])
            return local.num_connections

    assert asyncio.run(main()) == 0


@pytest.mark.parametrize("host", ["[fe80::1%a..b]", "a\0b"])
def test_a_host_that_cannot_be_looked_up_is_not_found(host: str) -> None:
    with pytest.raises(InvalidRequest, match="is not found"):
        asyncio.run(read(f"http://{host}/x", image_hosts=["*"]))


def test_hosts_outside_ascii_are_compared_and_asked_as_dns_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """`xn--mnchen-3ya` is the example of RFC 3492 with the German name of Munich."""

    async def resolve(host: str, port: int) -> str:
        return "127.0.0.1"

    monkeypatch.setattr(sources, "_resolve", resolve)

    async def main() -> list[str]:
        async with serving(lambda path: ok(FILE)) as local:
            for named in ("m\u00fcnchen.example", "xn--mnchen-3ya.example"):
                url = f"http://M\u00fcnchen.example:{local.port}/"
                assert await read(url, image_hosts=[named]) == FILE
            return [host.partition(":")[0] for host in local.hosts]

    assert asyncio.run(main()) == ["xn--mnchen-3ya.example"] * 2
    with pytest.raises(ConfigError, match=r"gateway\.image_hosts is \['a\.\.b'\]"):
        asyncio.run(read("http://a.b/", image_hosts=["a..b"]))


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        *((each, False) for each in ("10.0.0.1", "172.16.3.4", "192.168.0.9", "169.254.169.254", "100.64.0.1")),
        *((each, False) for each in ("0.0.0.0", "127.8.8.8", "224.0.0.1", "255.255.255.255", "198.18.0.1")),
        *((each, False) for each in ("::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:10.0.0.1")),
        *((each, False) for each in ("2002:7f00:1::", "64:ff9b::a00:1", "::ffff:169.254.169.254")),
        *((each, False) for each in ("fec0::1", "::127.0.0.1", "::8.8.8.8", "64:ff9b:1::808:808", "240.0.0.1")),
        *((each, True) for each in ("8.8.8.8", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808")),
    ],
)
def test_which_addresses_are_public(address: str, expected: bool) -> None:
    assert is_public(address) is expected


def test_a_host_is_resolved_once_and_its_address_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that means a public machine first and another one later does not lead there."""
    resolved: list[str] = []

    async def resolve(host: str, port: int) -> str:
        resolved.append(host)
        return "127.0.0.1"

    monkeypatch.setattr(sources, "_resolve", resolve)

    async def main() -> tuple[bytes, list[str]]:
        async with serving(lambda path: ok(FILE)) as local:
            found = await read(f"http://pictures.example:{local.port}/a.png?b=1", image_hosts=["pictures.example"])
            return found, local.hosts

    found, hosts = asyncio.run(main())
    assert found == FILE and resolved == ["pictures.example"]
    assert [host.partition(":")[0] for host in hosts] == ["pictures.example"], "the server is asked by its name"


def test_redirects_are_checked_and_few(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(host: str, port: int) -> str:
        return "127.0.0.1"

    monkeypatch.setattr(sources, "_resolve", resolve)

    def redirect(target: str) -> bytes:
        return f"HTTP/1.1 302 Found\r\nlocation: {target}\r\ncontent-length: 0\r\n\r\n".encode()

    answers = {
        "/a": redirect("/b"),
        "/b": ok(FILE),
        "/loop": redirect("/loop"),
        "/away": redirect("http://169.254.169.254/latest"),
        "/local": redirect("file:///etc/passwd"),
        "/broken": redirect("http://[bad"),
        "/none": b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
        "/large": ok(bytes(2000)),
    }

    async def main() -> None:
        async with serving(answers.__getitem__) as local:
            base, options = f"http://pictures.example:{local.port}", {"image_hosts": ["pictures.example"]}
            assert await read(f"{base}/a", **options) == FILE
            for path, message in (
                ("/loop", "more than 3 redirects"),
                ("/away", "gateway.image_hosts does not name it"),
                ("/local", "scheme 'file'"),
                ("/broken", r"redirects to 'http://\[bad', which is no URL"),
                ("/none", "answers 404"),
                ("/large", "gateway.max_image_bytes is 1000"),
            ):
                with pytest.raises(InvalidRequest, match=message):
                    await read(f"{base}{path}", **options, max_image_bytes=1000)

    asyncio.run(main())


def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(host: str, port: int) -> str:
        return "127.0.0.1"

    monkeypatch.setattr(sources, "_resolve", resolve)

    async def main() -> None:
        async with serving(lambda path: b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nabc") as local:
            with pytest.raises(InvalidRequest, match=r"within 0\.2 s|cannot be fetched"):
                await read(f"http://slow.example:{local.port}/", image_hosts=["slow.example"], image_timeout_s=0.2)

    asyncio.run(main())
