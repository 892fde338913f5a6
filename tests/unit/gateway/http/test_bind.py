"""Where the HTTP server listens."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.errors import ConfigError
from services.gateway.http.server import bind


def test_a_file_at_the_sockets_path_is_kept(tmp_path: Path) -> None:
    letter = tmp_path / "letter"
    letter.write_text("dear")
    with pytest.raises(ConfigError, match=f"unix:{letter}: the file there is not a socket"):
        bind(f"unix:{letter}")
    assert letter.read_text() == "dear"


def test_a_dead_processs_socket_is_taken_over(tmp_path: Path) -> None:
    bind(f"unix:{tmp_path}/http.sock").close()
    bind(f"unix:{tmp_path}/http.sock").close()
