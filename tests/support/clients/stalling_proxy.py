"""A proxy that stops forwarding a client's data midway. It still forwards answers."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.support.clients.http_clients import socket_path


@contextlib.contextmanager
def stalling_proxy(path: Path, target: str, num_bytes: int) -> Iterator[str]:
    """Address of a Unix socket that forwards to `target` only the first `num_bytes` of each connection."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(128)
    sockets = [listener]

    def accept() -> None:
        with contextlib.suppress(OSError):  # closed at the end
            while True:
                client, _ = listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(socket_path(target))
                sockets.extend((client, server))
                for source, sink, most in ((client, server, num_bytes), (server, client, None)):
                    threading.Thread(target=_pass_on, args=(source, sink, most), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"unix:{path}"
    finally:
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def _pass_on(source: socket.socket, sink: socket.socket, num_bytes: int | None) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            if num_bytes is not None:
                data, num_bytes = data[:num_bytes], num_bytes - len(data[:num_bytes])
            sink.sendall(data)
