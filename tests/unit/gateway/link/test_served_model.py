"""Asking a dense worker what it serves."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest

from services.gateway.link.served_model import ask_info
from services.pb import dense_pb2


class Stub:
    """A dense worker that answers."""

    def __init__(self) -> None:
        self.has_example: list[bool] = []

    async def GetInfo(self, request: dense_pb2.GetInfoRequest, timeout: float) -> dense_pb2.DenseInfo:
        self.has_example.append(request.HasField("example"))
        return dense_pb2.DenseInfo(family="llama")


def test_a_gateway_that_can_make_no_memory_file_asks_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the limit of open files, and where the kernel forbids them."""
    stub = Stub()
    asyncio.run(ask_info(stub, 1.0))

    def refuse(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert asyncio.run(ask_info(stub, 1.0)).family == "llama"
    assert stub.has_example == [True, False]
