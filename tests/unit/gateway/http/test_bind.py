"""How the HTTP server binds its Unix socket."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.errors import ConfigError
from services.gateway.http.server import bind


def test_a_file_at_the_path_of_the_socket_is_not_replaced(tmp_path: Path) -> None:
    letter = tmp_path / "letter"
    letter.write_text("dear")
    with pytest.raises(ConfigError, match=f"unix:{letter}: the file there is not a socket"):
        bind(f"unix:{letter}")
    assert letter.read_text() == "dear"


def test_the_socket_of_a_dead_process_is_replaced(tmp_path: Path) -> None:
    bind(f"unix:{tmp_path}/http.sock").close()
    bind(f"unix:{tmp_path}/http.sock").close()
