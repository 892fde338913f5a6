"""uvicorn inside the gateway. The gateway binds the socket, so that an address in use becomes a `ConfigError`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.config import GatewaySection
from services.gateway.access.client_address import ClientAddresses
from services.gateway.http.connection import Hangups
from services.gateway.http.cross_origin import CrossOrigin
from services.gateway.http.envelope import Envelope
from services.gateway.http.errors import Dialect
from services.gateway.http.protocol import BoundedProtocol
from services.rpc.bindable import cannot_listen, check_socket_free
from services.rpc.tls import TlsFiles, warn_if_exposed

START_TIMEOUT_S = 10.0
LOOK_INTERVAL_S = 0.01
MAX_BEGINNINGS = 8  # requests that begin in one iteration of the event loop; each takes 0.2 ms up to its first wait


class HttpServer:
    """Serves one ASGI application at `section.address`."""

    def __init__(
        self,
        app: ASGIApp,
        section: GatewaySection,
        tls: TlsFiles | None,
        dialects: Sequence[Dialect],
        *,
        announce: Callable[[], None],
        shares_port: bool,
        listener: int | None,
    ) -> None:
        """`dialects`: those that are not OpenAI's. `announce` is called when a request with a body has begun to arrive.
        `shares_port`: with other processes.

        `listener`: descriptor of a socket that listens at the address already, and that others keep open; None: the
        server binds its own.
        """
        self._section = section
        self._listener = listener
        self._tls = tls
        self._shares_port = shares_port
        self._task: asyncio.Task[None] | None = None
        self._socket: socket.socket | None = None
        self._hangups = Hangups()
        config = uvicorn.Config(
            Arrivals(CrossOrigin(Envelope(app, section, dialects), section.cors_origins)),
            http=_protocol_of(section, announce, self._hangups),
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="critical",  # errors are logged where they are handled
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=section.keep_alive_timeout_s,  # type: ignore[arg-type]  any number will do
            **({} if tls is None else _tls_options(tls)),
        )
        self._server = _Server(config, section.header_timeout_s)

    async def start(self) -> str:
        """Binds and serves; returns the address with the real port. Raises `ConfigError` if the address is in use."""
        if self._listener is None:
            self._socket = bind(self._section.http_address, shares_port=self._shares_port)
        else:
            self._socket = socket.socket(fileno=self._listener)
        if self._tls is None:
            warn_if_exposed(self._section.http_address)
        self._task = asyncio.create_task(self._server.serve([self._socket]))
        async with asyncio.timeout(START_TIMEOUT_S):
            while not self._server.started:
                if self._task.done():
                    self._task.result()
                await asyncio.sleep(0.005)
        if self._section.http_address.startswith("unix:"):
            return self._section.http_address
        return f"{self._section.http_address.rpartition(':')[0]}:{self._socket.getsockname()[1]}"

    async def leave(self, grace_s: float) -> None:
        """Accepts no new connections, which wait in the socket's queue for the next process, and ends idle ones.

        Clients that are connected and have not sent a request yet get `grace_s` seconds for it. After their answers
        all connections close.
        """
        if self._task is None:
            return
        for server in self._server.servers:
            server.close()
        connections = self._server.server_state.connections
        deadline = time.monotonic() + grace_s
        is_first = True  # turn of the loop, in which it makes the connections that it has just accepted
        while is_first or (any(each.is_new for each in connections) and time.monotonic() < deadline):
            is_first = False
            await asyncio.sleep(LOOK_INTERVAL_S)
        for connection in list(connections):
            connection.shutdown()

    async def stop(self, grace_s: float) -> None:
        """Accepts no new connections, gives running answers `grace_s` seconds to end, then cuts them."""
        if self._task is None:
            return
        self._server.config.timeout_graceful_shutdown = grace_s  # type: ignore[assignment]
        self._server.should_exit = True
        await self._task
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        self._hangups.close()
        if self._listener is None and self._section.http_address.startswith("unix:"):
            Path(self._section.http_address.removeprefix("unix:")).unlink(missing_ok=True)


class Arrivals:
    """Thousands of requests that come at once begin a few at a time, while streams and health checks go on.

    The outermost ASGI middleware. Nothing is known of requests yet, so they begin in the order of their arrival.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._num_begun = 0  # in this iteration of the event loop
        self._waiting: deque[asyncio.Future[None]] = deque()  # some only while as many as may have begun

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._num_begun == MAX_BEGINNINGS:
            place = asyncio.get_running_loop().create_future()
            self._waiting.append(place)
            await place
        else:
            self._note_begun()
        await self._app(scope, receive, send)

    def _note_begun(self) -> None:
        if not self._num_begun:
            asyncio.get_running_loop().call_soon(self._let_next_begin)
        self._num_begun += 1

    def _let_next_begin(self) -> None:
        self._num_begun = 0
        while self._waiting and self._num_begun < MAX_BEGINNINGS:
            place = self._waiting.popleft()
            if not place.done():  # else its connection was lost
                place.set_result(None)
                self._note_begun()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, handshake_timeout_s: float) -> None:
        super().__init__(config)
        self._handshake_timeout_s = handshake_timeout_s  # of TLS

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens itself if TLS is on, to set the time limit of handshakes: uvicorn's is a minute."""
        if self.config.ssl is None:
            await super().startup(sockets)
            return
        await super().startup([])
        loop = asyncio.get_running_loop()
        for listener in sockets or ():
            server = await loop.create_server(
                self._make_protocol,
                sock=listener,
                ssl=self.config.ssl,
                ssl_handshake_timeout=self._handshake_timeout_s,
                backlog=self.config.backlog,
            )
            self.servers.append(server)

    def _make_protocol(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the service, which stops this server itself."""
        yield


def bind(address: str, *, shares_port: bool = False) -> socket.socket:
    """A socket bound to HOST:PORT or unix:PATH; `shares_port` sets SO_REUSEPORT. Raises `ConfigError`."""
    try:
        if address.startswith("unix:"):
            path = address.removeprefix("unix:")
            check_socket_free(path)
            Path(path).unlink(missing_ok=True)
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(path)
        else:
            host, _, port = address.rpartition(":")
            target = (host.strip("[]"), int(port))
            family, kind, protocol, _, target = socket.getaddrinfo(*target, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, kind, protocol)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shares_port:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(target)
    except OSError as error:
        raise cannot_listen(error, address, "gateway.http_address") from error
    listener.setblocking(False)
    return listener


def _tls_options(tls: TlsFiles) -> dict[str, Any]:
    return {
        "ssl_certfile": tls.certificate,
        "ssl_keyfile": tls.key,
        "ssl_ca_certs": None if tls.ca is None else str(tls.ca),
        "ssl_cert_reqs": ssl.CERT_NONE if tls.ca is None else ssl.CERT_REQUIRED,
    }


def _protocol_of(
    of_gateway: GatewaySection, announce_request: Callable[[], None], of_server: Hangups
) -> type[BoundedProtocol]:
    class Protocol(BoundedProtocol):
        section = of_gateway
        announce = staticmethod(announce_request)
        hangups = of_server
        addresses = ClientAddresses(of_gateway.trusted_proxies)
        num_of: ClassVar[Counter[str]] = Counter()

    return Protocol
