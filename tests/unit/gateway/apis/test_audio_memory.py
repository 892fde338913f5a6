"""What a transcription counts of the memory of open requests while it runs."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send

from services.common.config import GatewaySection
from services.gateway.access.access import Access
from services.gateway.apis.audio import routes
from services.gateway.apis.audio.routes import Speech, audio_routes
from services.gateway.http.authorize import Authorize
from services.gateway.resources.memory_budget import HeldMemory, MemoryBudget
from services.gateway.sound.sound_reader import Sound

FEATURES = np.zeros((8, 100), np.float32)
FILE = bytes(50_000)
BODY = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + FILE + b"\r\n--x--\r\n"


def answer(reader: object, budget: MemoryBudget, receive: Receive) -> list[Message]:
    """What the route sends."""
    app = FastAPI()
    service = MagicMock(section=GatewaySection())
    app.include_router(audio_routes(service, Speech(MagicMock(languages={}), reader)))  # type: ignore[arg-type]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/audio/transcriptions",
        "query_string": b"",
        "headers": [(b"content-type", b"multipart/form-data; boundary=x")],
        "state": {"request_id": "r", "connection": SimpleNamespace(reads_nothing=nullcontext)},
    }
    sent = list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(Authorize(app, Access(None, ""), budget)(scope, receive, send))
    return sent


def test_a_file_counts_as_itself_once_its_form_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several wait for room for their features with it: at four times their size they would keep it from each other."""
    budget, counts = MemoryBudget(2**20), list[int]()

    class Reader:
        async def read(self, data: bytes, client: object, held: HeldMemory) -> Sound:
            assert data == FILE
            counts.append(held.num_bytes)
            return Sound(FEATURES, 1.0)

    class Answer(Response):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            counts.append(budget.num_held)
            await super().__call__(scope, receive, send)

    monkeypatch.setattr(routes, "_TranscriptionAnswer", lambda *_: Answer())

    async def receive() -> Message:
        return {"type": "http.request", "body": BODY}

    sent = answer(Reader(), budget, receive)
    assert sent[0]["status"] == 200, sent
    assert counts == [len(FILE), len(FILE)], "when it is read, and after that whatever the reader left"
    assert budget.num_held == 0


def test_a_file_whose_client_leaves_is_not_decoded() -> None:
    budget, is_waiting, has_ended = MemoryBudget(2**20), asyncio.Event(), list[bool]()

    class Reader:
        async def read(self, data: bytes, client: object, held: HeldMemory) -> Sound:
            is_waiting.set()
            try:
                async with asyncio.timeout(60):
                    await asyncio.Event().wait()
            except asyncio.CancelledError:
                has_ended.append(True)
                raise
            raise AssertionError("it is cancelled")

    messages = [{"type": "http.request", "body": BODY}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await is_waiting.wait()
        return {"type": "http.disconnect"}

    answer(Reader(), budget, receive)
    assert has_ended == [True] and budget.num_held == 0
