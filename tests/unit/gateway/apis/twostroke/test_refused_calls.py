"""The memory of a refused call is freed at once, before the garbage collector runs: its message may be large."""

from __future__ import annotations

import gc
from pathlib import Path

import grpc
import pytest

from services.common.errors import InvalidRequest
from tests.support.clients.gateway_calls import request, with_gateway
from tests.support.running_gateway import RunningGateway
from tests.support.workers.fake_dense import FakeDense


def test_a_refused_call_leaves_no_reference_cycle(tmp_path: Path) -> None:
    async def test(gateway: RunningGateway) -> None:
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                with pytest.raises(grpc.aio.AioRpcError, match="user has 500 characters"):
                    await gateway.stub.Generate(request(user="x" * 500))
            # Each exception would keep its frames alive, and with them the message.
            kept = [each for each in gc.get_objects() if type(each) is InvalidRequest]
        finally:
            gc.enable()
        assert not kept

    with_gateway(tmp_path, FakeDense(lambda _: []), test)
