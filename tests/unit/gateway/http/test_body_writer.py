"""`BodyWriter` writes the chunks of HTTP/1.1, and none to a client that does not read."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.http.connection import BodyWriter

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


class Connection:
    """A connection whose client parses what is written, and an answer that has begun."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        parser = httptools.HttpResponseParser(self)
        parser.feed_data(HEAD)
        self.flow = SimpleNamespace(write_paused=False)
        self.cycle: Any = SimpleNamespace(
            flow=self.flow, transport=SimpleNamespace(write=parser.feed_data), disconnected=False, chunked_encoding=True
        )

    def on_body(self, body: bytes) -> None:
        self.chunks.append(body)


@given(st.lists(TEXTS, min_size=1))
def test_each_text_is_a_chunk_with_its_json_in_the_frame(texts: list[str]) -> None:
    connection = Connection()
    write_text = BodyWriter(connection.cycle).text_writer(b'data: {"text":', b"}\n\n")
    for text in texts:
        write_text(text)
    events = [chunk.decode().removeprefix("data: ") for chunk in connection.chunks]
    assert [json.loads(event) for event in events] == [{"text": text} for text in texts]


def test_pieces_are_chunks() -> None:
    connection = Connection()
    pieces = [b"a", b"\r\n0\r\n\r\n", bytes(70_000)]
    for piece in pieces:
        BodyWriter(connection.cycle).write(piece)
    assert connection.chunks == pieces


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [("flow", "write_paused", True), ("cycle", "disconnected", True), ("cycle", "chunked_encoding", False)],
)
def test_only_a_client_that_reads_chunks_is_written_to(owner: str, name: str, value: bool) -> None:
    connection = Connection()
    writer = BodyWriter(connection.cycle)
    assert writer.can_write()
    setattr(getattr(connection, owner), name, value)
    assert not writer.can_write()
