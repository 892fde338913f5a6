"""Dense workers that die while they attach leave neither a second KV cache nor shared memory behind."""

from __future__ import annotations

import asyncio
import threading

import pytest
from prometheus_client import CollectorRegistry

from services.attn_worker import servicer as servicer_module
from services.attn_worker.build import build_engine
from services.attn_worker.engine import AttentionEngine
from services.attn_worker.servicer import AttentionServicer
from services.common.channel.shm_cleanup import NAME_PREFIX, SHM_DIR
from services.common.config import AttentionSection, ModelSection
from services.common.errors import PeerError
from services.common.resolve import resolve_model
from services.common.tracing import NoTracer
from services.pb import attn_pb2, stall_pb2

EPOCH = 0x5EA1_ED5E_0000_0001
TIMEOUT_S = 60.0


class FakeContext:
    def peer(self) -> str:
        return "test"


def num_regions() -> int:
    return len(list(SHM_DIR.glob(f"{NAME_PREFIX}{EPOCH:016x}-*")))


def test_a_dense_worker_that_dies_while_the_cache_is_built_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, num_builds = threading.Event(), 0

    def build_slowly(*arguments: object) -> AttentionEngine:
        nonlocal num_builds
        num_builds += 1
        assert may_end.wait(TIMEOUT_S)
        return build_engine(*arguments)

    async def on_stall(stall: stall_pb2.Stall | None) -> None:
        raise AssertionError(stall)

    monkeypatch.setattr(servicer_module, "build_engine", build_slowly)
    model = resolve_model(ModelSection(), "cpu")
    request = attn_pb2.AttachRequest(
        dtype="float32",
        model_fingerprint=model.config.fingerprint,
        weights_hash="00",
        max_num_seqs=4,
        max_num_batched_tokens=16,
    )

    async def attach_twice() -> None:
        section = AttentionSection(num_blocks=8)
        servicer = AttentionServicer(
            section, model, EPOCH, TIMEOUT_S, CollectorRegistry(), NoTracer(), TIMEOUT_S, on_stall
        )
        killed = asyncio.create_task(servicer.Attach(request, FakeContext()))
        while not num_builds:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        killed.cancel()
        await asyncio.gather(killed, return_exceptions=True)
        assert num_regions() == 0
        may_end.set()
        async with asyncio.timeout(TIMEOUT_S):
            reply = await servicer.Attach(request, FakeContext())
            assert (reply.attachment_id, num_builds, num_regions()) == (2, 1, 1)
            killed = asyncio.create_task(servicer.Attach(request, FakeContext()))
            await asyncio.sleep(0)  # it has handed its channel to the engine
            killed.cancel()
            await asyncio.gather(killed, return_exceptions=True)
            assert (await servicer.Attach(request, FakeContext())).attachment_id == 4
        assert num_regions() == 1
        servicer.abort()
        servicer.stop()

    asyncio.run(attach_twice())
    assert num_regions() == 0


def test_nobody_attaches_to_a_worker_that_is_stopping() -> None:
    """A dense worker that is told so would come back within milliseconds."""

    async def on_stall(stall: stall_pb2.Stall | None) -> None:
        raise AssertionError(stall)

    async def attach_late() -> None:
        model = resolve_model(ModelSection(), "cpu")
        servicer = AttentionServicer(
            AttentionSection(), model, EPOCH, TIMEOUT_S, CollectorRegistry(), NoTracer(), TIMEOUT_S, on_stall
        )
        await servicer.leave(TIMEOUT_S)
        with pytest.raises(PeerError, match="stopping"):
            await servicer.Attach(attn_pb2.AttachRequest(), FakeContext())
        assert num_regions() == 0

    asyncio.run(attach_late())
