"""A Hugging Face Hub on the loopback interface, with the parts of its HTTP API that a download needs, and its faults.

Weights lie at another address, as at the real Hub: `resolve` redirects to it, and names size and digest of the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_of_one_who_may_read"


@dataclass
class Repository:
    """A model's files, and what is special about it."""

    files: dict[str, bytes]
    is_gated: bool = False
    wrong_sizes: dict[str, int] = field(default_factory=dict)  # what the Hub says, by file
    breaks: dict[str, int] = field(default_factory=dict)  # by file: how many answers end in the middle


class Hub:
    """The server; `requests` are the method, path and range of all that it got."""

    def __init__(self, repositories: dict[str, Repository]) -> None:
        self.repositories = repositories
        self.requests: list[tuple[str, str, str | None]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"

    @contextlib.contextmanager
    def serving(self) -> Iterator[Hub]:
        thread = threading.Thread(target=self._server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()

    def downloads(self, name: str) -> list[str | None]:
        """The ranges of all requests for the content of a file."""
        return [range_ for method, path, range_ in self.requests if method == "GET" and path.endswith(f"/{name}")]

    def answer(self, call: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(call.path).path).strip("/")
        self.requests.append((call.command, path, call.headers.get("Range")))
        parts = path.removeprefix("api/models/").split("/")
        name, rest = "/".join(parts[:2]), parts[2:]
        if path.startswith("weights/"):
            owner, name, file = path.removeprefix("weights/").split("/", 2)
            return self._send_file(call, self.repositories[f"{owner}/{name}"], file)
        repository = self.repositories.get(name)
        if repository is None:
            return _send(call, 404, {"X-Error-Code": "RepoNotFound"}, {"error": "Repository not found"})
        if repository.is_gated and call.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _send(call, 403, {"X-Error-Code": "GatedRepo"}, {"error": f"Access to {name} is restricted"})
        if rest and rest[1] not in ("main", COMMIT):
            return _send(call, 404, {"X-Error-Code": "RevisionNotFound"}, {"error": "Invalid rev id"})
        if path.startswith("api/models/") and rest[:1] == ["tree"]:
            return _send(call, 200, {}, [_entry(file, data) for file, data in repository.files.items()])
        if path.startswith("api/models/"):
            siblings = [{"rfilename": file} for file in repository.files]
            return _send(call, 200, {}, {"id": name, "sha": COMMIT, "siblings": siblings})
        file = "/".join(rest[2:])
        data = repository.files[file]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        headers["X-Linked-Size"] = str(repository.wrong_sizes.get(file, len(data)))
        store = self.address.replace("127.0.0.1", "localhost")  # another host, whose headers no client reads
        headers["Location"] = f"{store}/weights/{name}/{file}"
        return _send(call, 302, headers, None)

    def _send_file(self, call: BaseHTTPRequestHandler, repository: Repository, file: str) -> None:
        data = repository.files[file]
        first = int((call.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        headers = {"Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}"} if first else {}
        call.send_response(206 if first else 200)
        for key, value in (headers | {"Content-Length": str(len(data) - first)}).items():
            call.send_header(key, value)
        call.end_headers()
        if call.command == "HEAD":
            return
        content = data[first:]
        if repository.breaks.get(file, 0):
            repository.breaks[file] -= 1
            call.close_connection = True
            content = content[: len(content) // 2]
        call.wfile.write(content)


def _entry(file: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


def _send(call: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: Any) -> None:
    content = b"" if body is None else json.dumps(body).encode()
    call.send_response(status)
    for key, value in (headers | {"Content-Length": str(len(content)), "Content-Type": "application/json"}).items():
        call.send_header(key, value)
    call.end_headers()
    if call.command != "HEAD":
        call.wfile.write(content)
