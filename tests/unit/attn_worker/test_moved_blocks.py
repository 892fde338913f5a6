"""Blocks of a sequence that moves arrive as they were at the worker that it leaves, or are computed again."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch

from services.attn_worker import moved_blocks
from services.attn_worker.cache.block_storage import BlockStorage
from services.attn_worker.cache.build_cache import build_cache
from services.attn_worker.cache.cached_sequence import OpenResult
from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.moved_blocks import BlockStaging, MovedBlocks
from services.attn_worker.openings import Openings
from services.common.errors import InvalidRequest, PeerError
from services.pb import attn_pb2, attn_pb2_grpc
from services.rpc.client import open_blocking_channel
from services.step import NewSequence
from tests.support.attention.open_now import fulfilling, open_sequence
from tests.support.plans import make_plan

NUM_BLOCKS, BLOCK_SIZE, HEAD_DIM, NUM_LAYERS = 12, 4, 6, 3
BLOCK_BYTES = NUM_LAYERS * BLOCK_SIZE * 2 * HEAD_DIM * 4
CPU, IDENTITY, LIMIT_S = torch.device("cpu"), "blocks of this test", 30.0
TOKENS = tuple(range(100, 100 + NUM_BLOCKS * BLOCK_SIZE - 3))  # 11 full blocks, and one token more
NUM_FULL = len(TOKENS) // BLOCK_SIZE


class Worker(attn_pb2_grpc.AttentionWorkerServicer):
    """The cache of an attention worker, and what it does for moves."""

    def __init__(self, identity: str = IDENTITY) -> None:
        self.cache = build_cache(NUM_BLOCKS, BLOCK_SIZE, max_model_len=NUM_BLOCKS * BLOCK_SIZE)
        self.cache.use_weights(b"w")
        spec = KVCacheSpec(NUM_BLOCKS, BLOCK_SIZE, 1, HEAD_DIM, torch.float32, (None,) * NUM_LAYERS)
        self.storage = BlockStorage(spec, spec.token_major_block, CPU)
        open_peer = partial(open_blocking_channel, max_message_bytes=2**20)
        self.moved = MovedBlocks(self.storage, self.cache.pools["blocks"], identity, open_peer, LIMIT_S)
        for side in (self.moved.sender, self.moved.receiver):  # a few blocks at a time, as with large models
            side._make_staging = partial(BlockStaging, self.storage, 3 * BLOCK_BYTES)
        self.calls: list[Callable[[], None]] = []
        self.on_part: Callable[[attn_pb2.BlockPart], object] = lambda part: None  # on the event loop
        runner: Any = SimpleNamespace(fence=lambda: None)
        noted = list[OpenResult]()
        self.openings = Openings(self.cache, runner, self._submit, noted.append, self.moved.receiver)

    async def ReadBlocks(
        self, request: attn_pb2.ReadBlocksRequest, context: grpc.aio.ServicerContext
    ) -> None:
        async def write(part: attn_pb2.BlockPart) -> None:
            if asyncio.iscoroutine(waiting := self.on_part(part)):
                await waiting
            await context.write(part)

        await self.moved.sender.send(self.moved.digests_of(request.identity, request.digests), write)

    def _submit(self, function: Callable[..., None], *arguments: Any) -> Any:
        self.calls.append(lambda: function(*arguments))

    def begin(self, seq_id: int, leaves_address: str) -> Future[OpenResult]:
        opened: Future[OpenResult] = Future()
        new = NewSequence(seq_id, "r", TOKENS, len(TOKENS), leaves_address=leaves_address)
        self.openings.open(new, fulfilling(opened))
        return opened

    def open(self, seq_id: int, leaves_address: str = "") -> OpenResult:
        opened = self.begin(seq_id, leaves_address)
        deadline = time.monotonic() + LIMIT_S
        while not opened.done():
            assert time.monotonic() < deadline
            while self.calls:
                self.calls.pop(0)()
            time.sleep(0.001)
        self.cache.check_integrity()
        return opened.result()

    def block(self, seq_id: int, index: int) -> torch.Tensor:
        """The content of a block of a sequence, in all layers."""
        row = self.cache._sequences[seq_id].row
        block_id = int(self.cache._main.block_ids[row, index])
        return torch.stack([layer[block_id] for layer in self.storage.layers])

    def compute(self, seq_id: int, num_cached: int = 0) -> None:
        """Computes what it lacks, with random content; then it leaves."""
        assert self.cache.plan_step(make_plan([(seq_id, len(TOKENS) - num_cached, num_cached)])).errors == {}
        for layer in self.storage.layers:
            layer.normal_()
        self.cache.commit_step()

    def leave(self, seq_id: int) -> None:
        self.cache.close_sequences([seq_id])


class Served:
    """A worker that serves its blocks over gRPC, from an event loop in a thread of its own."""

    def __init__(self, worker: Worker, address: str) -> None:
        self.worker, self.address = worker, address
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._run(self._start())

    def _run(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(LIMIT_S)

    async def _start(self) -> None:
        self._server = grpc.aio.server()
        attn_pb2_grpc.add_AttentionWorkerServicer_to_server(self.worker, self._server)
        self._server.add_insecure_port(self.address)
        await self._server.start()

    def kill(self) -> None:
        """Ends all calls at once, as the end of its process does."""
        self._run(self._server.stop(0))

    def close(self) -> None:
        self.kill()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_S)
        self._loop.close()


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Served]:
    """A worker that a sequence has left."""
    worker = Worker()
    worker.open(1)
    worker.compute(1)
    served = Served(worker, f"unix:{tmp_path}/left.sock")
    yield served
    served.close()
    worker.moved.close()


@pytest.fixture
def other() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.moved.close()


def expected_blocks(left: Served) -> list[torch.Tensor]:
    blocks = [left.worker.block(1, index).clone() for index in range(NUM_FULL)]
    left.worker.leave(1)
    return blocks


def check(other: Worker, expected: Sequence[torch.Tensor], num_blocks: int) -> None:
    for index in range(num_blocks):
        assert torch.equal(other.block(7, index), expected[index]), index


def test_all_full_blocks_are_copied_and_can_be_found(left: Served, other: Worker) -> None:
    expected = expected_blocks(left)
    result = other.open(7, left.address)
    assert (result.num_cached_tokens, result.num_copied_blocks) == (NUM_FULL * BLOCK_SIZE, NUM_FULL)
    check(other, expected, NUM_FULL)
    other.compute(7, result.num_cached_tokens)
    other.leave(7)
    again = other.open(8)
    assert (again.num_cached_tokens, again.num_copied_blocks) == (NUM_FULL * BLOCK_SIZE, 0)


def test_blocks_that_are_here_are_not_copied_again(left: Served, other: Worker) -> None:
    expected_blocks(left)
    other.open(6)
    other.compute(6)
    other.leave(6)
    assert other.open(7, left.address).num_copied_blocks == 0


def digest_of(left: Served, index: int) -> bytes:
    """By which the cache of a worker that a sequence has left finds one of its blocks."""
    open_sequence(left.worker.cache, 2, TOKENS, len(TOKENS))
    digest = left.worker.cache._sequences[2].digests[index]
    left.worker.leave(2)
    return digest


def test_what_others_have_overwritten_is_computed_again(left: Served, other: Worker) -> None:
    expected = expected_blocks(left)
    left.worker.cache.pools["blocks"].discard(digest_of(left, 5))
    result = other.open(7, left.address)
    assert (result.num_cached_tokens, result.num_copied_blocks) == (5 * BLOCK_SIZE, 5)
    check(other, expected, 5)


def test_what_others_overwrite_while_it_is_read_is_computed_again(left: Served, other: Worker) -> None:
    expected = expected_blocks(left)
    lost, make_staging, parts = digest_of(left, 4), left.worker.moved.sender._make_staging, list[int]()

    def make_disturbed() -> BlockStaging:
        staging = make_staging()
        read = staging.copier.read

        def read_disturbed(block_ids: Sequence[int], rows: Sequence[int]) -> list[int]:
            checksums = read(block_ids, rows)
            parts.append(len(checksums))
            if len(parts) == 2:  # blocks 3 to 5
                left.worker.cache.pools["blocks"].discard(lost)
            return checksums

        disturbed: Any = staging.copier
        disturbed.read = read_disturbed
        return staging

    left.worker.moved.sender._make_staging = make_disturbed
    assert other.open(7, left.address).num_copied_blocks == 4
    check(other, expected, 4)


def test_a_block_that_changes_on_its_way_is_computed_again(left: Served, other: Worker) -> None:
    expected = expected_blocks(left)
    parts = list[attn_pb2.BlockPart]()

    def spoil(part: attn_pb2.BlockPart) -> None:
        parts.append(part)
        if len(parts) == 2:  # blocks 3 to 5
            part.content = part.content[: BLOCK_BYTES + 8] + b"\x01" + part.content[BLOCK_BYTES + 9 :]

    left.worker.on_part = spoil
    result = other.open(7, left.address)
    assert (result.num_cached_tokens, result.num_copied_blocks) == (4 * BLOCK_SIZE, 4)
    check(other, expected, 4)


def test_large_blocks_come_in_parts(left: Served, other: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = expected_blocks(left)
    sizes = list[int]()
    left.worker.on_part = lambda part: sizes.append(len(part.content))
    monkeypatch.setattr(moved_blocks, "PART_BYTES", 100)
    assert other.open(7, left.address).num_copied_blocks == NUM_FULL
    assert max(sizes) == 100 and sum(sizes) == NUM_FULL * BLOCK_BYTES
    check(other, expected, NUM_FULL)


def test_a_worker_that_dies_in_the_middle_leaves_what_has_come(left: Served, other: Worker) -> None:
    expected = expected_blocks(left)
    parts, killer = list[attn_pb2.BlockPart](), threading.Thread(target=left.kill)

    async def die(part: attn_pb2.BlockPart) -> None:
        parts.append(part)
        if len(parts) == 3:
            killer.start()
            await asyncio.Event().wait()

    left.worker.on_part = die
    result = other.open(7, left.address)
    killer.join(LIMIT_S)
    assert result.num_copied_blocks in (3, 6)  # the last part may not have left
    assert result.num_cached_tokens == result.num_copied_blocks * BLOCK_SIZE
    check(other, expected, result.num_copied_blocks)


def test_a_worker_that_is_not_there_is_no_error(other: Worker, tmp_path: Path) -> None:
    result = other.open(7, f"unix:{tmp_path}/nobody.sock")
    assert (result.num_cached_tokens, result.num_copied_blocks) == (0, 0)


def test_a_worker_with_other_blocks_sends_none(left: Served, other: Worker) -> None:
    expected_blocks(left)
    left.worker.moved._identity = "other blocks"
    assert other.open(7, left.address).num_copied_blocks == 0
    with pytest.raises(InvalidRequest, match=f"blocks are other blocks, and {IDENTITY} are wanted"):
        left.worker.moved.digests_of(IDENTITY, b"")
    with pytest.raises(InvalidRequest, match="16 bytes each, 17 came"):
        left.worker.moved.digests_of("other blocks", bytes(17))


def test_the_end_of_an_attachment_ends_its_copies(left: Served, other: Worker) -> None:
    expected_blocks(left)
    is_sending = threading.Event()

    async def hang(part: attn_pb2.BlockPart) -> None:
        is_sending.set()
        await asyncio.Event().wait()

    left.worker.on_part = hang
    opened = other.begin(7, left.address)
    assert is_sending.wait(LIMIT_S)
    other.openings.cancel_all()
    assert opened.cancelled()
    assert other.cache.num_free_blocks == NUM_BLOCKS and not other.calls
    left.worker.on_part = lambda part: None
    assert other.open(8, left.address).num_copied_blocks == NUM_FULL  # the next attachment copies again


def test_a_cache_with_more_than_blocks_computes_again(left: Served) -> None:
    other = Worker()
    other.openings._receiver = None
    assert other.open(7, left.address).num_cached_tokens == 0
    other.moved.close()


def test_a_receiver_that_hangs_ends_in_time_and_lets_the_next_one_have_its_turn(left: Served) -> None:
    expected_blocks(left)
    sender, digests, parts = left.worker.moved.sender, [digest_of(left, 0)], list[attn_pb2.BlockPart]()

    async def hang(part: attn_pb2.BlockPart) -> None:
        await asyncio.Event().wait()

    async def collect(part: attn_pb2.BlockPart) -> None:
        parts.append(part)

    async def send_both() -> None:
        sender._longest_s = 0.05
        hanging = asyncio.create_task(sender.send(digests, hang))
        await asyncio.sleep(0)  # it has its turn
        sender._longest_s = LIMIT_S
        await sender.send(digests, collect)
        with pytest.raises(PeerError, match="1 blocks have not been sent within"):
            await hanging

    asyncio.run(send_both())
    assert [len(each.content) for each in parts] == [BLOCK_BYTES]
