"""`python -m tests.support.clients.crowd`: sends requests to a gateway all at once, from a process of its own.

It reads a list of [path, headers, body in base64] as JSON from standard input, sends each on a connection of its own to
the Unix socket that is its argument, and prints [status, number of bytes of the answer] of each as JSON. In the process
of a test, reading large answers would delay the test's other clients.
"""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence

LIMIT_S = 120.0
READ_BYTES = 2**20


class Crowd:
    """Requests that run in another process."""

    def __init__(self, address: str, requests: Sequence[tuple[str, Mapping[str, str], bytes]]) -> None:
        """Starts them. `requests`: path, headers and body of each; `address`: `unix:PATH`."""
        command = [sys.executable, "-m", __spec__.name, address.removeprefix("unix:")]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        encoded = [(path, dict(headers), base64.b64encode(body).decode()) for path, headers, body in requests]
        self._process.stdin.write(json.dumps(encoded).encode() + b"\n")
        self._process.stdin.flush()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def answers(self) -> list[tuple[int, int]]:
        """Waits for the status and the number of bytes of each answer."""
        output, _ = self._process.communicate(timeout=LIMIT_S + 30)
        assert self._process.returncode == 0
        return [(status, num_bytes) for status, num_bytes in json.loads(output)]


async def _ask(path: str, data: bytes) -> tuple[int, int]:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(data)
    status, num_bytes = 0, 0
    while piece := await reader.read(READ_BYTES):
        status = status or int(piece.split(b" ", 2)[1])
        num_bytes += len(piece)
    writer.close()
    return status, num_bytes


async def _main(socket_path: str) -> None:
    datas = []
    for path, headers, body in json.loads(sys.stdin.readline()):
        data = base64.b64decode(body)
        lines = {"host": "gateway", "connection": "close", "content-type": "application/json"} | headers
        lines["content-length"] = str(len(data))
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        datas.append(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data)
    async with asyncio.timeout(LIMIT_S):
        answers = await asyncio.gather(*(_ask(socket_path, data) for data in datas))
    print(json.dumps(answers))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
