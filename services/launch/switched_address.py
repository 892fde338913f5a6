"""`SwitchedAddress`: the one address at which others find the present worker of a role.

Every worker listens at its own socket. The address in the config is a symbolic link to the present worker's socket, so
a switch is one atomic rename. A TCP port cannot be switched like this, so a worker there cannot be replaced.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from services.rpc.server import check_socket_free

UNIX = "unix:"


class SwitchedAddress:
    """Owns the link. Raises `ConfigError` if `address` is in use, see `check_socket_free`."""

    def __init__(self, address: str, run_dir: Path, name: str) -> None:
        """`name`: with which the sockets of the workers begin."""
        self._link = Path(address.removeprefix(UNIX)) if address.startswith(UNIX) else None
        self._address = address
        self._run_dir = run_dir
        self._name = name
        self._numbers = itertools.count(1)
        self._target = ""
        if self._link is not None:
            check_socket_free(str(self._link))

    @property
    def can_switch(self) -> bool:
        """Whether the address can be switched to a second worker."""
        return self._link is not None

    def new_address(self) -> str:
        """A new address for one more worker."""
        if self._link is None:
            return self._address
        return f"{UNIX}{self._run_dir}/{self._name}-{next(self._numbers)}.sock"

    def point_to(self, address: str) -> None:
        """Makes those that connect from now on find the worker at this address, made by `new_address`."""
        if self._link is None:
            return
        self._target = address.removeprefix(UNIX)
        beside = self._link.with_name(f"{self._link.name}.new")
        beside.unlink(missing_ok=True)
        beside.symlink_to(self._target)
        beside.replace(self._link)

    def remove(self) -> None:
        """Removes the link, if it is still this one."""
        if self._link is not None and self._link.is_symlink() and os.readlink(self._link) == self._target:
            self._link.unlink()
