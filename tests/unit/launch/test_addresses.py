"""What the launcher says of addresses it cannot serve at."""

from __future__ import annotations

import socket

import pytest

from services.common.errors import ConfigError
from services.launch.addresses import check_free


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: port in use"):
            check_free(f"127.0.0.1:{port}")


def test_a_host_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no-such-host\.invalid:8080"):
        check_free("no-such-host.invalid:8080")


def test_a_port_that_nobody_would_find_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:0: nobody would find it; ports are from 1 to 65535"):
        check_free("127.0.0.1:0")
