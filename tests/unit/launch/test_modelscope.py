"""Models by name from ModelScope, by a server on the loopback interface that answers its package as ModelScope does."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
import threading
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from services.common.errors import ConfigError
from services.launch.hub import fetch_model

FILES = {"config.json": b"{}", "model.safetensors": b"weights", "pytorch_model.bin": b"pickled"}
MODELS = {"org/tiny": FILES, "org/pickled": {"pytorch_model.bin": b"pickled"}}
with_package = pytest.mark.skipif(
    importlib.util.find_spec("modelscope") is None, reason="the package modelscope is not installed"
)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query, parts = parse_qs(url.query), url.path.split("/")
        files = MODELS.get("/".join(parts[4:6]))
        if "FilePath" in query:
            body = (files or {})[query["FilePath"][0]]
        elif parts[3] == "models" and files is None:
            self.send_error(404)
            return
        else:
            listed = [
                {"Path": name, "Type": "blob", "Size": len(data), "Sha256": hashlib.sha256(data).hexdigest()}
                for name, data in (files or {}).items()
            ]
            body = json.dumps({"Code": 200, "Success": True, "Data": {"Files": listed}}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")  # the package keeps the first address
def modelscope_server() -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODELSCOPE_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield
    server.shutdown()
    thread.join()
    server.server_close()


@with_package
def test_only_what_serves_is_downloaded(modelscope_server: None, tmp_path: Path) -> None:
    path = fetch_model("org/tiny", None, tmp_path, "modelscope")
    assert {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()} == {
        name: data for name, data in FILES.items() if name != "pytorch_model.bin"
    }


@with_package
@pytest.mark.parametrize(
    ("name", "said"), [("org/nothing", "is not at ModelScope"), ("org/pickled", "at ModelScope has no safetensors")]
)
def test_what_is_not_there_or_no_safetensors_is_refused(
    name: str, said: str, modelscope_server: None, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"model '{name}' {said}"):
        fetch_model(name, None, tmp_path, "modelscope")


def test_an_older_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    older = types.ModuleType("modelscope")
    older.snapshot_download = None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "modelscope", older)
    monkeypatch.setitem(sys.modules, "modelscope_hub", None)
    with pytest.raises(ConfigError, match=r"modelscope_hub.* perhaps it is old: pip install 'twostroke\[modelscope\]'"):
        fetch_model("org/tiny", None, None, "modelscope")


def test_without_the_package_one_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"is to come from ModelScope: pip install 'twostroke\[modelscope\]'"):
        fetch_model("org/tiny", None, None, "modelscope")
