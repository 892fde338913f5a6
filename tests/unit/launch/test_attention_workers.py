"""Attention workers that `ctl` adds or drains, when it goes away in the middle."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc

from services.common.child_options import ChildOptions
from services.common.config import Config
from services.launch.attention_workers import AttentionWorkers
from services.launch.child import ATTENTION_ROLE
from services.pb import dense_pb2, dense_pb2_grpc

LIMIT_S = 30.0


class Dense(dense_pb2_grpc.DenseWorkerServicer):
    async def RemoveAttentionWorker(
        self, request: dense_pb2.RemoveAttentionWorkerRequest, context: grpc.aio.ServicerContext
    ) -> dense_pb2.RemoveAttentionWorkerReply:
        return dense_pb2.RemoveAttentionWorkerReply()


def test_a_worker_that_was_drained_is_stopped_even_if_the_caller_goes_away(tmp_path: Path) -> None:
    events = list[str]()

    async def wait(grace_s: float) -> None:
        events.append("ended")

    async def forget(child: object) -> None:
        events.append("forgotten")

    async def run() -> None:
        is_telling, may_go_on = asyncio.Event(), asyncio.Event()

        @contextlib.asynccontextmanager
        async def suspended(*, is_taken: bool) -> AsyncIterator[None]:
            is_telling.set()
            await may_go_on.wait()
            yield

        config, name = Config(), f"{ATTENTION_ROLE}-1"
        address = f"unix:{tmp_path}/dense.sock"
        dense: Any = SimpleNamespace(
            address=address, tls=None, config=config, reconfigure=lambda config: events.append("told")
        )
        child: Any = SimpleNamespace(
            name=name,
            role=ATTENTION_ROLE,
            options=ChildOptions(attention_index=1),
            address=f"unix:{tmp_path}/attn.sock",
            config=config,
            stop=lambda: events.append("stopped"),
            wait=wait,
        )
        children: Any = Children([child], dense)
        children.forget = forget
        standby: Any = SimpleNamespace(suspended=suspended)
        make_child: Any = None
        workers = AttentionWorkers(children, make_child, standby, config, tmp_path)
        server = grpc.aio.server()
        dense_pb2_grpc.add_DenseWorkerServicer_to_server(Dense(), server)
        server.add_insecure_port(address)
        await server.start()
        try:
            draining = asyncio.create_task(workers.drain(name, LIMIT_S))
            await is_telling.wait()
            draining.cancel()
            await asyncio.sleep(0)
            may_go_on.set()
            await asyncio.gather(draining, return_exceptions=True)
        finally:
            await server.stop(0)

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))
    assert events == ["told", "stopped", "ended", "forgotten"]


class Children(list[Any]):
    def __init__(self, workers: list[Any], dense: Any) -> None:
        super().__init__(workers)
        self._dense = dense

    def of_role(self, role: str) -> list[Any]:
        return [self._dense]
