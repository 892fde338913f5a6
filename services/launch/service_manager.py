"""`ServiceManager`: tells systemd that the server is ready, that it lives, and that it stops (sd_notify(3)).

Without systemd, that is without `NOTIFY_SOCKET`, it does nothing. Runs in the launcher's event loop, so that systemd's
watchdog (`WatchdogSec`) restarts a launcher that hangs; the launcher itself watches all else.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time

import structlog

from services.common.config import ServiceManagerEnvironment
from services.common.errors import ConfigError

log = structlog.get_logger()

READY_TIMEOUT_S, RETRY_S = 30.0, 0.1  # while systemd's socket is full


class ServiceManager:
    """Sends datagrams. Only `ready` waits, if systemd reads too slowly, and not for long."""

    def __init__(self, environment: ServiceManagerEnvironment) -> None:
        self._address = environment.notify_socket
        self._is_ready = asyncio.Event()
        self._interval_s: float | None = None  # between two signs of life; None: nobody asks for them
        if environment.watchdog_usec is not None and environment.watchdog_pid in (None, os.getpid()):
            self._interval_s = environment.watchdog_usec / 1e6 / 2  # half of what is allowed, as systemd advises

    async def ready(self, status: str) -> None:
        """Called when clients are served. Raises `ConfigError` if systemd's socket is not there.

        While the socket is full it tries again, for `READY_TIMEOUT_S`; then the log says that systemd was not told.
        """
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            try:
                self._send(f"READY=1\nSTATUS={status}")
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    log.warning("systemd was not told", message="READY=1", reason=error.strerror)
                    return
            except OSError as error:
                raise ConfigError(f"NOTIFY_SOCKET {self._address!r} cannot be reached: {error.strerror}") from error
            await asyncio.sleep(RETRY_S)
        self._is_ready.set()

    def stopping(self) -> None:
        """Called when the server begins to stop."""
        self._try_to_send("STOPPING=1")

    async def keep_alive(self) -> None:
        """Sends signs of life, which systemd expects once it is told `ready`, until cancelled."""
        if self._address is None or self._interval_s is None:
            await asyncio.Event().wait()
            return
        await self._is_ready.wait()
        while True:
            self._try_to_send("WATCHDOG=1")
            await asyncio.sleep(self._interval_s)

    def _try_to_send(self, message: str) -> None:
        try:
            self._send(message)
        except OSError as error:
            log.warning("systemd was not told", message=message, reason=error.strerror)

    def _send(self, message: str) -> None:
        if self._address is None:
            return
        address = self._address
        if address.startswith("@"):  # a socket without a file
            address = f"\0{address[1:]}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(message.encode(), address)
