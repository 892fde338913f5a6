"""Why a service cannot listen at an address, and what to do about it: the same sentence for every kind of server."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path

from services.common.errors import ConfigError

MAX_SOCKET_PATH_BYTES = 107  # the limit of Linux


def check_bindable(address: str, setting: str) -> None:
    """Raises `ConfigError` if nobody can listen there now. `setting`: as for `cannot_listen`."""
    if address.startswith("unix:"):
        directory = Path(address.removeprefix("unix:")).parent
        if not os.access(directory, os.W_OK | os.X_OK):
            raise cannot_listen(PermissionError(errno.EACCES, f"{directory} cannot be written"), address, setting)
        return
    host, _, port = address.rpartition(":")
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except OSError as error:
        raise cannot_listen(error, address, setting) from error


def check_socket_free(path: str) -> None:
    """Checks that a Unix socket can be bound. gRPC would replace any file there without a check.

    A socket, or a link to one, that a dead process left may be replaced. Raises `ConfigError` if a process listens on
    the socket, if another file is there, or if the path cannot be a socket's.
    """
    if len(path.encode()) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"cannot listen on unix:{path}: the path has {len(path.encode())} bytes, "
            f"the limit is {MAX_SOCKET_PATH_BYTES}"
        )
    if not Path(path).parent.is_dir():
        raise ConfigError(f"cannot listen on unix:{path}: there is no directory {Path(path).parent}")
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if not stat.S_ISSOCK(mode) and not stat.S_ISLNK(mode):
            raise ConfigError(f"cannot listen on unix:{path}: the file there is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return
    raise ConfigError(f"cannot listen on unix:{path}: another process serves there")


def cannot_listen(error: OSError, address: str, setting: str) -> ConfigError:
    """The error for an address where `error` came. `setting`: the key of the config that it is from; empty: of none."""
    is_http, host, port = setting == "gateway.http_address", *address.rpartition(":")[::2]
    of_port = "--port" if is_http else f"--set {setting}={host}:PORT"
    of_host = "--host" if is_http else f"--set {setting}=HOST:{port}"
    other = "; a second server needs another --port, too" if setting == "gateway.address" else ""
    reason, mend = {
        errno.EADDRINUSE: ("port in use", f"stop the other server, or choose another port by {of_port}{other}"),
        errno.EADDRNOTAVAIL: ("address not of this host", f"choose one of its own by {of_host}"),
        errno.EACCES: ("not permitted to this user", f"choose a port from 1024 on by {of_port}"),
    }.get(error.errno, (error.strerror, ""))
    if address.startswith("unix:"):
        reason, mend = error.strerror, ""
    said = f"{reason}; {mend}" if mend and setting else reason
    return ConfigError(f"cannot listen on {f'{setting} {address}'.strip()}: {said}")
