"""`SwitchedAddress`: the one address at which others find the present worker of a role.

Every worker listens at a socket of its own beside that address, which is a symbolic link to the present worker's
socket: whoever sees the link, in whichever container, sees the socket, too. A switch is one atomic rename. A TCP port
cannot be switched like this, so a worker there cannot be replaced.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from services.common.errors import ConfigError
from services.rpc.bindable import check_socket_free

UNIX = "unix:"


class SwitchedAddress:
    """Owns the link and the sockets. Raises `ConfigError` if `address` is in use, see `check_socket_free`."""

    def __init__(self, address: str) -> None:
        self._link = Path(address.removeprefix(UNIX)) if address.startswith(UNIX) else None
        self.address = address  # the one at which others find the worker
        self._sockets: list[Path] = []  # of all workers so far: one that is killed leaves its own
        self._token = secrets.token_hex(4)  # in their names, for another launcher may come to use this address
        self._target = ""
        if self._link is not None:
            check_socket_free(str(self._link))
            _remove_dead_sockets(self._link)

    @property
    def can_switch(self) -> bool:
        """Whether the address can be switched to a second worker."""
        return self._link is not None

    def new_address(self) -> str:
        """A new address for one more worker."""
        if self._link is None:
            return self.address
        name = f"{self._link.name}-{self._token}-{len(self._sockets) + 1}"
        self._sockets.append(self._link.with_name(name))
        return f"{UNIX}{self._sockets[-1]}"

    def point_to(self, address: str) -> None:
        """Makes those that connect from now on find the worker at this address, made by `new_address`.

        Raises `OSError` if there is no room for a symbolic link: then nothing has changed.
        """
        self.prepare(address)()

    def prepare(self, address: str) -> Callable[[], None]:
        """`point_to` later: what this gives switches, once, even if the disk is full by then. Raises `OSError` as it.
        """
        if self._link is None:
            return lambda: None
        link, target = self._link, Path(address.removeprefix(UNIX)).name
        beside = _link_beside(link.with_name(target))
        beside.unlink(missing_ok=True)
        beside.symlink_to(target)

        def switch() -> None:
            beside.replace(link)
            self._target = target

        return switch

    def remove(self) -> None:
        """Removes the sockets, what leads to them, and the link if it is still this one. All workers have ended."""
        if self._link is not None and self._link.is_symlink() and os.readlink(self._link) == self._target:
            self._link.unlink()
        for path in self._sockets:
            path.unlink(missing_ok=True)
            _link_beside(path).unlink(missing_ok=True)


def _link_beside(path: Path) -> Path:
    """The name of the link to a worker's socket until it becomes the one at the address."""
    return path.with_name(f"{path.name}.link")


def _remove_dead_sockets(link: Path) -> None:
    """Removes the sockets of workers whose launcher was killed."""
    for path in link.parent.glob(f"{link.name}-*"):
        with contextlib.suppress(ConfigError):  # one that is in use, or no socket
            check_socket_free(str(path))
            path.unlink(missing_ok=True)
