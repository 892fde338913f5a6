"""`DenseAddress`: the one address where gateways find whichever dense worker is the present one.

Every dense worker listens at a socket of its own; the address in the config is a symbolic link to the present one's,
so that a switch is one atomic rename. A TCP port cannot be passed on like this: a worker there cannot be replaced.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from services.rpc.server import check_socket_free

UNIX = "unix:"


class DenseAddress:
    """Owns the link. Raises `ConfigError` if `address` is taken, see `check_socket_free`."""

    def __init__(self, address: str, run_dir: Path) -> None:
        self._link = Path(address.removeprefix(UNIX)) if address.startswith(UNIX) else None
        self._address = address
        self._run_dir = run_dir
        self._numbers = itertools.count(1)
        self._target = ""
        if self._link is not None:
            check_socket_free(str(self._link))

    @property
    def can_switch(self) -> bool:
        """Whether there can be a second worker."""
        return self._link is not None

    def new_address(self) -> str:
        """Where one more dense worker can listen."""
        if self._link is None:
            return self._address
        return f"{UNIX}{self._run_dir}/dense-{next(self._numbers)}.sock"

    def point_to(self, address: str) -> None:
        """From now on gateways that connect find the worker at this one of the `new_address`es."""
        if self._link is None:
            return
        self._target = address.removeprefix(UNIX)
        beside = self._link.with_name(f"{self._link.name}.new")
        beside.unlink(missing_ok=True)
        beside.symlink_to(self._target)
        beside.replace(self._link)

    def remove(self) -> None:
        """Takes the link away, if it is still this one."""
        if self._link is not None and self._link.is_symlink() and os.readlink(self._link) == self._target:
            self._link.unlink()
