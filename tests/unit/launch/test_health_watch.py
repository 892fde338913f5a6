"""Which service the launcher kills because of a stall."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.config import MAX_MESSAGE_BYTES
from services.common.errors import ConfigError
from services.common.process import cpu_wait_s
from services.launch.health_watch import MIN_MISSED, HealthRecord, HealthWatch
from services.pb import attn_pb2, attn_pb2_grpc, stall_pb2
from services.rpc.client import open_channel
from services.rpc.health import HealthServicer

BOUND_S, START_S = 10.0, 300.0
DENSE, ATTENTION, GATEWAY = "dense_worker", "attn_worker", "gateway"


@dataclass
class FakeChild:
    role: str


def stall(role: str, waits_for: str = "", stalled_s: float = BOUND_S) -> HealthRecord:
    said = stall_pb2.Stall(role=role, step_id=7, layer=3, request_ids=["a"], waits_for=waits_for, stalled_s=stalled_s)
    return HealthRecord(0.0, 1000.0, has_served=True, stall=said)


def silent(since_s: float, *, has_served: bool = True) -> HealthRecord:
    return HealthRecord(0.0, 1000.0 - since_s, MIN_MISSED, has_served)


FINE = HealthRecord(0.0, 1000.0, has_served=True)


def blame(watch: HealthWatch, now: float = 1000.0, **records: HealthRecord) -> list[str]:
    return [child.role for child, _ in watch.find_culprits([(FakeChild(role), each) for role, each in records.items()],
                                                           now)]


@pytest.fixture
def watch() -> HealthWatch:
    return HealthWatch(list, BOUND_S, START_S)


def test_only_a_service_that_does_not_answer_is_blamed(watch: HealthWatch) -> None:
    waits = stall(DENSE, waits_for=ATTENTION)
    assert blame(watch, attn_worker=silent(11), dense_worker=waits, gateway=FINE) == [ATTENTION]
    assert blame(watch, attn_worker=silent(9), dense_worker=FINE, gateway=FINE) == []
    assert blame(watch, attn_worker=FINE, dense_worker=FINE, gateway=silent(11)) == [GATEWAY]


def test_a_silence_with_few_missed_checks_is_not_a_stall(watch: HealthWatch) -> None:
    assert blame(watch, gateway=HealthRecord(0.0, 0.0, MIN_MISSED - 1, has_served=True)) == []


def test_the_time_that_a_service_waits_for_a_cpu_is_no_silence(watch: HealthWatch) -> None:
    starved = silent(14)
    starved.waited_s = 5.0
    assert blame(watch, gateway=starved) == []
    starved.waited_s = 3.0
    assert blame(watch, gateway=starved) == [GATEWAY]


def test_only_waits_for_a_cpu_since_the_last_answer_count() -> None:
    """A process on one CPU with a busy one waits for it. After it has answered, nothing counts."""
    [cpu, *_] = os.sched_getaffinity(0)
    busy = [sys.executable, "-c", f"import os\nos.sched_setaffinity(0, [{cpu}])\nwhile True: pass"]
    with subprocess.Popen(busy) as process, subprocess.Popen(busy) as other:
        try:
            record = HealthRecord(has_served=True)
            for _ in range(MIN_MISSED):
                time.sleep(0.2)
                record.note_missed(process.pid)
            assert record.waited_s > 0.05
            record.note_answer()
            assert (record.num_missed, record.waited_s) == (0, 0.0)
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)  # until it is stopped
            before_s = cpu_wait_s(process.pid)
            time.sleep(0.1)
            assert cpu_wait_s(process.pid) == before_s, "a process that is stopped does not wait for a CPU"
        finally:
            process.kill()
            other.kill()


def test_waits_of_the_launcher_for_a_cpu_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    waits_s = {7: 2.0, os.getpid(): 100.0}
    monkeypatch.setattr("services.launch.health_watch.cpu_wait_s", waits_s.__getitem__)
    record = HealthRecord(has_served=True)
    record.note_missed(7)
    waits_s |= {7: 2.5, os.getpid(): 101.0}
    record.note_missed(7)
    assert (record.num_missed, record.waited_s) == (2, 1.5)


def test_a_service_that_has_not_served_yet_has_the_time_of_a_start(watch: HealthWatch) -> None:
    assert blame(watch, dense_worker=silent(START_S - 1, has_served=False)) == []
    assert blame(watch, dense_worker=silent(START_S + 1, has_served=False)) == [DENSE]


def test_a_start_may_take_several_times_as_long_as_earlier_starts(watch: HealthWatch) -> None:
    watch.note_start(ATTENTION, 6.0)
    watch.note_start(ATTENTION, 5.0)
    watch.note_start(DENSE, 200.0)
    assert blame(watch, attn_worker=silent(33, has_served=False), dense_worker=FINE) == []
    assert blame(watch, attn_worker=silent(35, has_served=False), dense_worker=FINE) == [ATTENTION]
    assert blame(watch, attn_worker=FINE, dense_worker=silent(START_S - 1, has_served=False)) == []
    assert blame(watch, attn_worker=FINE, dense_worker=silent(START_S + 1, has_served=False)) == [DENSE]


def test_the_service_that_computes_too_long_is_blamed_and_not_the_waiting_one(watch: HealthWatch) -> None:
    assert blame(watch, attn_worker=stall(ATTENTION), dense_worker=stall(DENSE, ATTENTION)) == [ATTENTION]
    assert blame(watch, attn_worker=stall(ATTENTION, DENSE), dense_worker=stall(DENSE)) == [DENSE]


def test_if_both_wait_for_each_other_first_the_dense_worker_is_blamed_and_then_both(watch: HealthWatch) -> None:
    records = {ATTENTION: stall(ATTENTION, DENSE), DENSE: stall(DENSE, ATTENTION)}
    assert blame(watch, **records) == [DENSE]
    assert blame(watch, now=1020.0, **records) == [ATTENTION, DENSE]
    assert blame(watch, now=2000.0, **records) == [DENSE]


def test_who_waits_for_a_service_that_does_not_answer_is_not_ended_before_that_one(watch: HealthWatch) -> None:
    records = [(FakeChild(DENSE), stall(DENSE)), (FakeChild(DENSE), silent(BOUND_S - 1))]  # two ranks
    assert watch.find_culprits(records, 1000.0) == []
    [(child, _)] = watch.find_culprits(records, 1002.0)
    assert child is records[1][0]
    records[1][1].note_answer()  # it only was late
    assert [child.role for child, _ in watch.find_culprits(records, 1003.0)] == [DENSE, DENSE]


def test_attention_workers_that_have_worked_since_the_last_stall_keep_their_caches(watch: HealthWatch) -> None:
    """Ending the dense worker has helped. The next stall has a cause of its own, however soon it comes."""
    attention, other = stall(ATTENTION, DENSE), stall(ATTENTION, DENSE)
    records = [(FakeChild(ATTENTION), attention), (FakeChild(ATTENTION), other), (FakeChild(DENSE), stall(DENSE))]

    def blamed(now: float) -> list[object]:
        found = [child for child, _ in watch.find_culprits(records, now)]
        return [child for child, _ in records if any(child is each for each in found)]

    attention.num_tokens = other.num_tokens = 500  # long before
    assert blamed(1000.0) == [records[2][0]]
    attention.num_tokens += 1
    other.num_tokens += 1
    assert blamed(1020.0) == [records[2][0]]
    attention.num_tokens += 1
    assert blamed(1040.0) == [records[1][0], records[2][0]], "the other one may be the cause"


def test_a_dense_worker_of_another_launcher_has_time_to_be_ended_there(watch: HealthWatch) -> None:
    waits = stall(ATTENTION, DENSE, stalled_s=21.0)
    assert blame(watch, attn_worker=waits) == []
    assert blame(watch, now=1002.0, attn_worker=waits) == []
    assert blame(watch, now=1011.0, attn_worker=waits) == [ATTENTION], "it was not ended, or that has not helped"


def test_a_service_that_waits_for_a_healthy_one_gets_twice_the_time(watch: HealthWatch) -> None:
    assert blame(watch, attn_worker=FINE, dense_worker=stall(DENSE, ATTENTION)) == []
    assert blame(watch, attn_worker=FINE, dense_worker=stall(DENSE, ATTENTION, stalled_s=21.0)) == [DENSE]


def test_the_reason_names_step_layer_and_requests(watch: HealthWatch) -> None:
    [(_, reason)] = watch.find_culprits([(FakeChild(DENSE), stall(DENSE))], 1000.0)
    assert "step 7" in reason and "layer 3" in reason and "requests a" in reason


class ChildWithoutFiles(FakeChild):
    """A service whose certificate is missing while it is renewed."""

    pid, address, is_running = 1, "127.0.0.1:1", True

    def open_channel(self) -> NoReturn:
        raise ConfigError("TLS file 'peer.pem' cannot be read")

    async def kill_hanging(self, reason: str) -> None:
        raise AssertionError(reason)


def test_missing_tls_files_kill_no_service() -> None:
    watch = HealthWatch(lambda: [ChildWithoutFiles(DENSE)], 0.05, 0.1)

    async def run() -> None:
        async with asyncio.timeout(0.5):
            await watch.run()

    with pytest.raises(TimeoutError):
        asyncio.run(run())


class DeafChild(FakeChild):
    """A process at whose address nobody answers."""

    pid, address, is_running = os.getpid(), "127.0.0.1:1", True
    reason = ""

    def open_channel(self) -> grpc.aio.Channel:
        return open_channel(self.address, MAX_MESSAGE_BYTES)

    async def kill_hanging(self, reason: str) -> None:
        self.reason = reason


def test_a_service_that_hangs_before_its_first_check_is_found_once_the_server_has_started() -> None:
    child = DeafChild(ATTENTION)
    watch = HealthWatch(lambda: [child], 0.05, START_S)

    async def run() -> None:
        watching = asyncio.create_task(watch.run())
        await asyncio.sleep(0.5)
        assert not child.reason, "it may still start"
        watch.note_started()
        async with asyncio.timeout(60.0):
            while not child.reason:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        watching.cancel()

    asyncio.run(run())
    assert "no answer" in child.reason


def test_a_service_is_known_to_serve_long_before_its_first_check(tmp_path: Path) -> None:
    """From then on it has no more the time of a start to be silent."""
    child = DeafChild(ATTENTION)
    child.address = f"unix:{tmp_path}/attn.sock"
    watch = HealthWatch(lambda: [child], 1000.0, START_S)

    async def run() -> None:
        health, server = HealthServicer(), grpc.aio.server()
        health.set([""], health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        server.add_insecure_port(child.address)
        watching = asyncio.create_task(watch.run())
        await server.start()
        async with asyncio.timeout(60.0):
            while not any(each.has_served for each in watch._records.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        watching.cancel()
        await server.stop(0)

    asyncio.run(run())


def test_the_successor_of_a_service_that_hangs_before_its_first_check_has_the_time_of_a_start() -> None:
    watch = HealthWatch(lambda: [DeafChild(ATTENTION)], BOUND_S, START_S)
    watch.note_started()
    assert blame(watch, attn_worker=silent(BOUND_S - 1, has_served=False)) == []
    assert blame(watch, attn_worker=silent(BOUND_S + 1, has_served=False)) == [ATTENTION]


class CountingWorker(attn_pb2_grpc.AttentionWorkerServicer):
    """An attention worker that serves and has computed 41 tokens. Most of its steps only closed sequences."""

    async def GetStatus(
        self, request: attn_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> attn_pb2.AttentionStatus:
        return attn_pb2.AttentionStatus(num_steps=500, num_computed_tokens=41)


def test_the_tokens_of_an_attention_worker_that_serves_are_read(tmp_path: Path) -> None:
    """Whether one has worked since a stall, the next stall is too late to ask.

    A new dense worker first lets it close what clients have given up, which is no work.
    """
    child = DeafChild(ATTENTION)
    child.address = f"unix:{tmp_path}/attn.sock"
    watch = HealthWatch(lambda: [child], 1.0, START_S)

    async def run() -> None:
        health, server = HealthServicer(), grpc.aio.server()
        health.set([""], health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        attn_pb2_grpc.add_AttentionWorkerServicer_to_server(CountingWorker(), server)
        server.add_insecure_port(child.address)
        await server.start()
        watching = asyncio.create_task(watch.run())
        async with asyncio.timeout(60.0):
            while [each.num_tokens for each in watch._records.values()] != [41]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        watching.cancel()
        await server.stop(0)

    asyncio.run(run())
