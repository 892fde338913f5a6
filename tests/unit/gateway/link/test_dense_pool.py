"""Several streams: each replica gets sequences, and when one dies another replica continues its sequences."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.common.config import PeerSection
from services.common.errors import PeerError, RequestAborted
from services.gateway.link import dense_pool
from services.gateway.link.dense_pool import DensePool
from services.gateway.link.journal import Journal
from services.gateway.link.journal_entry import FinishReason, JournalEntry
from services.pb import dense_pb2, dense_pb2_grpc
from services.rpc import start_deadline
from services.rpc.client import DENSE_WORKER
from services.rpc.start_deadline import StartDeadline
from tests.support.clients.generation_requests import make_request, open_entry, take
from tests.support.cluster import free_port
from tests.support.running_gateway import run, until
from tests.support.workers.fake_dense import FakeDense

LONG = 1000  # tokens; no test waits for so many


class Replica(FakeDense):
    """A fake dense worker with a health service, at its own port."""

    def __init__(self, epoch: int, *, step_s: float = 0.002) -> None:
        super().__init__(count_up, step_s=step_s)
        self.info.epoch = epoch
        self.address = f"127.0.0.1:{free_port()}"
        self.is_serving = True

    async def start(self, address: str | None = None) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        dense_pb2_grpc.add_DenseWorkerServicer_to_server(self, self._server)
        self.health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        await self.set_serving(self.is_serving)
        self._server.add_insecure_port(self.address)
        await self._server.start()

    async def set_serving(self, is_serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        await self.health.set(DENSE_WORKER, status.SERVING if is_serving else status.NOT_SERVING)


class BuildingWorker(dense_pb2_grpc.DenseWorkerServicer):
    """Loads without end: while `is_building`, each answer reports a part more."""

    def __init__(self) -> None:
        self.is_building, self.num_built, self.num_asked = True, 0, 0

    async def GetStatus(
        self, request: dense_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> dense_pb2.DenseStatus:
        self.num_asked += 1
        self.num_built += self.is_building
        return dense_pb2.DenseStatus(state=dense_pb2.DenseStatus.LOADING, loading=f"[{self.num_built}/99]")


class Gateway:
    def __init__(self, address: str, num_streams: int, connect_timeout_s: float = 20.0) -> None:
        self.journal = Journal()
        self.replicas: Sequence[Replica] = ()  # the replicas behind `address`
        self.connections: list[bool] = []
        peers = PeerSection(connect_timeout_s=connect_timeout_s)
        self.pool = DensePool(
            address, peers, self.journal, self._on_connection, num_streams, rebalance_interval_s=0.02
        )

    async def _on_connection(self, is_connected: bool) -> None:
        self.connections.append(is_connected)

    def submit(self, first_token: int, max_tokens: int = LONG) -> JournalEntry:
        request = make_request(str(first_token), prompt_token_ids=[first_token], max_tokens=max_tokens)
        entry = open_entry(self.journal, request)
        self.pool.submit(entry)
        return entry


@contextlib.asynccontextmanager
async def replicas(
    *replicas: Replica, num_streams: int = 2, connect_timeout_s: float = 20.0
) -> AsyncIterator[Gateway]:
    """Runs these replicas and a gateway in front of them."""
    for replica in replicas:
        await replica.start()
    address = "ipv4:" + ",".join(replica.address for replica in replicas)
    gateway = Gateway(address, num_streams, connect_timeout_s)
    gateway.replicas = replicas
    task = asyncio.create_task(gateway.pool.run())
    try:
        await gateway.pool.wait_connected()
        yield gateway
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        for replica in replicas:
            await replica.kill()


def count_up(submit: dense_pb2.Submit) -> Sequence[int]:
    """Tokens that depend only on the prompt, so all replicas agree: 100, 101, ... for a prompt of 100."""
    return range(submit.spec.prompt_token_ids[0], submit.spec.prompt_token_ids[0] + LONG)


async def all_tokens(entry: JournalEntry) -> list[int]:
    token_ids: list[int] = []
    while entry.finish_reason is None or len(token_ids) < len(entry.output_token_ids):
        token_ids += await take(entry)
    return token_ids


async def found(gateway: Gateway, num_workers: int) -> None:
    """Waits until the gateway has streams to `num_workers` replicas."""
    await until(lambda: sum(replica.num_ready_streams > 0 for replica in gateway.replicas) == num_workers)


def test_sequences_are_distributed_evenly_among_replicas() -> None:
    async def test() -> None:
        pair = Replica(1), Replica(2)
        async with replicas(*pair) as gateway:
            await found(gateway, 2)
            entries = [gateway.submit(1000 * i) for i in range(1, 7)]
            await until(lambda: all(len(replica.running) == 3 for replica in pair))
            for entry in entries:
                gateway.pool.cancel(entry)
                gateway.journal.close(entry)
            await until(lambda: not any(replica.running for replica in pair))

    run(test())


def test_a_new_sequence_goes_to_the_stream_with_the_fewest_open_ones() -> None:
    async def test() -> None:
        pair = Replica(1), Replica(2)
        async with replicas(*pair) as gateway:
            await found(gateway, 2)
            entries = [gateway.submit(1000 * i) for i in range(1, 5)]
            await until(lambda: all(len(replica.running) == 2 for replica in pair))
            emptied = pair[0]
            for entry in entries:
                if entry.seq_id in emptied.running:
                    gateway.pool.cancel(entry)
                    gateway.journal.close(entry)
            await until(lambda: not emptied.running)
            entries = [gateway.submit(1000 * i) for i in range(5, 7)]
            await until(lambda: len(emptied.running) == 2)
            assert len(pair[1].running) == 2

    run(test())


def test_when_a_replica_dies_only_its_sequences_move_to_another() -> None:
    async def test() -> None:
        pair = dying, other = Replica(1), Replica(2)
        async with replicas(*pair) as gateway:
            await found(gateway, 2)
            entries = [gateway.submit(1000 * i, max_tokens=400) for i in range(1, 5)]
            await until(lambda: all(len(entry.output_token_ids) > 5 for entry in entries))
            moved = set(dying.running)
            await dying.kill()
            outputs = await asyncio.gather(*map(all_tokens, entries))
            assert outputs == [list(range(1000 * i, 1000 * i + 400)) for i in range(1, 5)]
            assert {entry.finish_reason for entry in entries} == {FinishReason.LENGTH}
            assert len(moved) == 2
            resubmitted = {submit.seq_id for submit in other.submits if submit.output_token_ids}
            assert resubmitted == moved
            assert gateway.connections == [True], "one replica is enough to serve"
            assert gateway.pool.num_resubmitted == 2

    run(test())


def test_sequences_wait_for_any_replica_when_all_are_gone() -> None:
    async def test() -> None:
        pair = Replica(1), Replica(2)
        async with replicas(*pair) as gateway:
            await found(gateway, 2)
            entries = [gateway.submit(1000 * i, max_tokens=60) for i in range(1, 5)]
            await until(lambda: all(len(entry.output_token_ids) > 5 for entry in entries))
            for replica in pair:
                await replica.kill()
            await until(lambda: gateway.connections == [True, False])
            entries.append(gateway.submit(5000, max_tokens=60))  # arrives while no replica runs
            await pair[1].start()
            outputs = await asyncio.gather(*map(all_tokens, entries))
            assert outputs == [list(range(1000 * i, 1000 * i + 60)) for i in range(1, 6)]

    run(test())


def test_a_sequence_that_waited_too_long_fails_with_the_address() -> None:
    async def test() -> None:
        replica = Replica(1)
        async with replicas(replica, connect_timeout_s=1.0) as gateway:
            entry = gateway.submit(1000)
            await take(entry)
            await replica.kill()
            with pytest.raises(PeerError, match=rf"no dense worker at ipv4:{replica.address} within 1 s"):
                while True:
                    await take(entry)

    run(test())


def test_a_replica_that_does_not_serve_gets_no_sequences() -> None:
    async def test() -> None:
        sick, healthy = Replica(1), Replica(2)
        sick.is_serving = False
        async with replicas(sick, healthy) as gateway:
            entries = [gateway.submit(1000 * i, max_tokens=20) for i in range(1, 5)]
            await asyncio.gather(*map(all_tokens, entries))
            assert not sick.submits and len(healthy.submits) == 4
            for entry in entries:
                gateway.journal.close(entry)
            await sick.set_serving(True)  # now a stream connects to it
            await found(gateway, 2)
            entries = [gateway.submit(1000 * i) for i in range(5, 9)]
            await until(lambda: len(sick.running) == 2 == len(healthy.running))

    run(test())


def test_two_streams_to_one_worker_work() -> None:
    async def test() -> None:
        replica = Replica(1)
        async with replicas(replica, num_streams=2) as gateway:
            for i in range(1, 10):  # meanwhile the surplus stream is reopened several times
                assert await all_tokens(gateway.submit(1000 * i, max_tokens=20)) == list(range(1000 * i, 1000 * i + 20))
            assert gateway.connections == [True]
            assert gateway.pool.num_resubmitted == 0

    run(test())


def test_a_replica_with_other_weights_gets_no_sequences() -> None:
    async def test() -> None:
        first, other = Replica(1), Replica(2)
        async with replicas(first, num_streams=1) as gateway:
            pool = gateway.pool
            hashes = pool.model.weights_hash
            assert hashes == first.info.weights_hash
        other.info.weights_hash = "beef"
        async with replicas(first, other) as gateway:
            served = first if gateway.pool.model.weights_hash == first.info.weights_hash else other
            entries = [gateway.submit(1000 * i, max_tokens=30) for i in range(1, 5)]
            await asyncio.gather(*map(all_tokens, entries))
            assert len(served.submits) == 4
            assert {id(replica) for replica in (first, other) if replica.submits} == {id(served)}

    run(test())


def test_if_all_replicas_have_other_weights_old_answers_fail() -> None:
    async def test() -> None:
        replica = Replica(1)
        async with replicas(replica, num_streams=2) as gateway:
            entry = gateway.submit(1000)
            await take(entry)
            await replica.kill()
            replica.info.weights_hash, replica.info.epoch = "beef", 2
            await replica.start()
            with pytest.raises(RequestAborted, match="other weights"):
                while True:
                    await take(entry)

    run(test())


def test_max_model_len_is_the_smallest_of_all_replicas() -> None:
    async def test() -> None:
        pair = Replica(1), Replica(2)
        pair[1].info.max_model_len = 512
        async with replicas(*pair) as gateway:
            await found(gateway, 2)
            await until(lambda: gateway.pool.model.max_model_len == 512)

    run(test())


def test_a_name_is_resolved_by_grpc() -> None:
    async def test() -> None:
        replica = Replica(1)
        await replica.start()
        gateway = Gateway(f"dns:///localhost:{replica.address.rpartition(':')[2]}", num_streams=1)
        task = asyncio.create_task(gateway.pool.run())
        await gateway.pool.wait_connected()
        assert await all_tokens(gateway.submit(1000, max_tokens=5)) == list(range(1000, 1005))
        task.cancel()
        await asyncio.wait([task])
        await replica.kill()

    run(test())


def test_a_gateway_waits_for_a_worker_that_builds_and_not_for_one_that_has_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(start_deadline, "POLL_S", 0.005)
    monkeypatch.setattr(start_deadline, "CALL_TIMEOUT_S", 60.0)
    monkeypatch.setattr(dense_pool, "StartDeadline", partial(StartDeadline, now=lambda: now_s))

    async def asked_twice(worker: BuildingWorker) -> None:
        before = worker.num_asked
        await until(lambda: worker.num_asked > before + 1)  # so one answer has arrived that was asked for in between

    async def main() -> None:
        nonlocal now_s
        server, worker = grpc.aio.server(), BuildingWorker()
        dense_pb2_grpc.add_DenseWorkerServicer_to_server(worker, server)
        server.add_insecure_port(address := f"unix:{tmp_path}/dense.sock")
        await server.start()
        gateway = Gateway(address, num_streams=1, connect_timeout_s=0.05)
        running = asyncio.create_task(gateway.pool.run())
        waiting = asyncio.create_task(gateway.pool.wait_connected())
        await asked_twice(worker)
        for _ in range(20):
            now_s += 0.04
            await asked_twice(worker)
        assert not waiting.done()
        worker.is_building = False
        await asked_twice(worker)
        now_s += 0.05
        with pytest.raises(PeerError, match=r"no dense worker at .* within 0.05 s"):
            await waiting
        running.cancel()
        await asyncio.wait([running])
        await server.stop(None)

    run(main())


def test_a_flush_is_confirmed_by_all_workers_and_a_later_one_knows_it_before_its_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        first, second = Replica(1), Replica(2)
        async with replicas(first, second) as gateway:
            await until(lambda: first.num_ready_streams == second.num_ready_streams == 1)
            await gateway.pool.forget_prefixes()
            assert first.flushes == second.flushes == [0], "without a wait of the test"
            second.confirms_flushes = False
            with monkeypatch.context() as short:
                short.setattr(gateway.pool, "_peers", PeerSection(rpc_timeout_s=0.1))
                with pytest.raises(PeerError, match=r"at .*, 2 went away or did not confirm it within 0.1 s"):
                    await gateway.pool.forget_prefixes()
            asking = asyncio.create_task(gateway.pool.forget_prefixes())
            await until(lambda: len(second.flushes) == 3)
            await second.kill()
            with pytest.raises(PeerError, match=", 2 went away"):
                await asking  # at once, long before the time limit
            second.flushes, second.submits, second.confirms_flushes = [], [], True
            second.info.epoch = 3
            await second.start()
            await until(lambda: second.num_ready_streams == 1)
            assert second.flushes == [gateway.pool.prefix_generation] == [3]
            await gateway.pool.forget_prefixes()
            assert second.flushes == [3, 0] and first.flushes.count(0) == 4

    run(test())
