"""Processes that decode sound: who kills them or leaves harms no other file."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor, WhisperProcessor

from services.common.errors import CapacityError, InvalidRequest
from services.gateway.resources.memory_budget import BYTES_PER_BODY_BYTE, HeldMemory, MemoryBudget
from services.gateway.sound import sound_reader
from services.gateway.sound.decode import MAX_SHORT_S, read_sound
from services.gateway.sound.sound_reader import Sound, SoundReader
from tests.support.speech import NUM_MEL_BINS, PIECES, RATE, WINDOW_S, byte_tokenizer, sound_file, sound_of

CLIENT, OTHER = (0, 1), (0, 2)
FILE = sound_file(sound_of(0.4))
NUM_BYTES = NUM_MEL_BINS * 100 * 4  # of its features


def room(client: tuple[int, int]) -> HeldMemory:
    return HeldMemory(MemoryBudget(2**20), client)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., None]:
    extractor = WhisperFeatureExtractor(feature_size=NUM_MEL_BINS, sampling_rate=RATE, chunk_length=WINDOW_S)
    extractor.save_pretrained(tmp_path)

    def run(body: Callable[[SoundReader], Awaitable[None]], max_seconds: int = 5) -> None:
        async def run_body() -> None:
            reader = SoundReader(tmp_path, max_seconds)
            try:
                await body(reader)
            finally:
                await reader.close()

        asyncio.run(run_body())

    return run


def test_features_are_those_of_the_processor_that_transformers_saved(run: Any, tmp_path: Path) -> None:
    """transformers 5 writes no preprocessor_config.json."""
    extractor = WhisperFeatureExtractor(
        feature_size=NUM_MEL_BINS, sampling_rate=RATE, chunk_length=WINDOW_S, hop_length=200, n_fft=480
    )
    (tmp_path / "preprocessor_config.json").unlink()
    WhisperProcessor(extractor, byte_tokenizer(PIECES)).save_pretrained(tmp_path)
    assert not (tmp_path / "preprocessor_config.json").exists()
    truth = WhisperProcessor.from_pretrained(tmp_path).feature_extractor
    samples = read_sound(FILE, RATE, max_seconds=5)
    expected = truth(samples, sampling_rate=RATE, truncation=False, padding="max_length", return_tensors="np")

    async def body(reader: SoundReader) -> None:
        found = await reader.read(FILE, CLIENT, room(CLIENT))
        assert found.features.shape == (NUM_MEL_BINS, 80)
        np.testing.assert_array_equal(found.features, expected["input_features"][0])

    run(body)


def check(sound: Sound) -> None:
    assert sound.features.shape == (NUM_MEL_BINS, 100) and sound.seconds == 0.4


def test_files_go_on_after_kills_and_clients_that_leave(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(reader: SoundReader) -> None:
        check(await reader.read(FILE, CLIENT, room(CLIENT)))
        _, killed = reader._processes.idle  # and the spare one
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        check(await reader.read(FILE, CLIENT, room(CLIENT)))

        _, process = reader._processes.idle
        os.kill(process.pid, signal.SIGSTOP)  # so that it has the file while the client leaves
        leaving = asyncio.create_task(reader.read(FILE, CLIENT, room(CLIENT)))
        await asyncio.sleep(0.05)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        check(await reader.read(FILE, OTHER, room(OTHER)))  # in another process
        os.kill(process.pid, signal.SIGCONT)
        [work] = reader._work
        check(await work)
        assert process in reader._processes.idle and process.poll() is None, "it is still good"

        for each in reader._processes.idle:
            os.kill(each.pid, signal.SIGSTOP)
        monkeypatch.setattr(reader._turns, "_max_wait_s", 0.1)
        busy = [asyncio.create_task(reader.read(FILE, CLIENT, room(CLIENT))) for _ in range(2)]
        stopped = list(reader._processes.idle)
        await asyncio.sleep(0)
        with pytest.raises(CapacityError, match=r"waited 0\.1 s"):
            await reader.read(FILE, OTHER, room(OTHER))
        for each in stopped:
            os.kill(each.pid, signal.SIGCONT)
        for each in busy:
            check(await each)

    monkeypatch.setattr(sound_reader, "MOST_PROCESSES", 2)
    run(body)


class FakeProcesses:
    """Ends short files at once, and long ones when they are told to."""

    def __init__(self) -> None:
        self.running, self.most = list[bytes](), 0
        self.num_recognised = 0  # long ones, which come again
        self.begun = list[bytes]()  # long ones
        self.may_end = asyncio.Event()

    async def run(self, exchange: Any, timeout_s: float, what: str) -> Sound | None:
        data, is_long = exchange.keywords["data"], exchange.keywords["is_long"]
        self.running.append(data)
        self.most = max(self.most, len(self.running))
        try:
            await asyncio.sleep(0)
            if is_long:
                self.begun.append(data)
                await self.may_end.wait()
            elif data.startswith(b"long"):
                self.num_recognised += 1
                return None
            return Sound(np.zeros((1, 1), np.float32), 1.0)
        finally:
            self.running.remove(data)

    async def close(self) -> None:
        self.may_end.set()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("num_processes", [2, 4])
def test_short_files_wait_for_no_long_one_whoever_sent_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_processes: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2 * num_processes)
    clients = [(i, 1) for i in range(1, 21)]

    async def body() -> None:
        reader, processes = SoundReader(tmp_path, 5), FakeProcesses()
        monkeypatch.setattr(reader, "_processes", processes)
        reads = [
            asyncio.create_task(reader.read(b"long %d of %d" % (i, tenant), (tenant, 1), room((tenant, 1))))
            for tenant, _ in clients
            for i in range(2)
        ]
        await until(lambda: processes.num_recognised == len(reads))
        await until(lambda: len(processes.begun) == num_processes - 1)
        assert processes.begun == processes.running
        for client in (*clients, (21, 1)):
            async with asyncio.timeout(60):
                await asyncio.gather(*(reader.read(b"short", client, room(client)) for _ in range(3)))
        assert len(processes.begun) == num_processes - 1 and not any(each.done() for each in reads)

        leaving = reads.pop()  # a long one that waits
        leaving.cancel()
        await asyncio.wait({leaving})
        processes.may_end.set()
        await asyncio.gather(*reads)
        assert processes.most == num_processes, "no more than that at any time"
        later = [each.split()[-1] for each in processes.begun[num_processes:]]
        assert len(set(later[:18])) >= 17, "clients take turns at long files, too"
        assert (reader._turns._num_free, reader._long_turns._num_free) == (num_processes, num_processes - 1)
        await reader.close()

    asyncio.run(body())


def test_a_file_that_takes_longer_when_it_comes_again_is_decoded_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is short by its CPU time may be long the next time, when there is room for its features."""

    async def body() -> None:
        reader, processes = SoundReader(tmp_path, 5), FakeProcesses()
        monkeypatch.setattr(reader, "_processes", processes)
        processes.may_end.set()
        budget = MemoryBudget(100, max_wait_s=60, max_waiting=8)
        first, second = HeldMemory(budget, OTHER), HeldMemory(budget, CLIENT)
        await first.reserve(98, "logits")
        reading = asyncio.create_task(reader.read(data := bytearray(b"short"), CLIENT, second))  # type: ignore[arg-type]
        await until(lambda: bool(budget.num_waiting))
        data[:] = b"long."
        first.release()
        assert (await reading).seconds == 1.0 and processes.begun
        await reader.close()

    asyncio.run(body())


def test_hundreds_of_files_of_a_client_wait_and_hold_up_no_other_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As an evaluation sends them: a whole data set at once, from one client, which tries nothing again."""

    async def body() -> None:
        reader, processes = SoundReader(tmp_path, 5), FakeProcesses()
        monkeypatch.setattr(reader, "_processes", processes)
        reads = [asyncio.create_task(reader.read(b"long", CLIENT, room(CLIENT))) for _ in range(300)]
        await until(lambda: processes.num_recognised == len(reads))
        short = [asyncio.create_task(reader.read(b"short %d" % i, CLIENT, room(CLIENT))) for i in range(300)]
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await reader.read(b"short", OTHER, room(OTHER))
        assert sum(each.done() for each in short) < 10, "clients take turns"
        await asyncio.gather(*short)
        assert not any(each.done() for each in reads)
        processes.may_end.set()
        await asyncio.gather(*reads)
        await reader.close()

    asyncio.run(body())


def test_a_process_killed_within_a_long_file_delays_no_short_one(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is stopped with a part of the file, then killed. The long file is decoded again, and whole."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    long = sound_file(sound_of(MAX_SHORT_S + 1))
    extractor = WhisperFeatureExtractor.from_pretrained(tmp_path)
    samples = read_sound(long, RATE, max_seconds=60)
    expected = extractor(samples, sampling_rate=RATE, truncation=False, padding="max_length", return_tensors="np")

    async def body(reader: SoundReader) -> None:
        processes, stopped = reader._processes, list[Any]()
        plain_run = processes.run

        async def stop_and_run(exchange: Any, *args: Any, **options: Any) -> Any:
            if exchange.keywords["is_long"]:
                _, process = processes.idle
                os.kill(process.pid, signal.SIGSTOP)
                stopped.append(process)
            return await plain_run(exchange, *args, **options)

        monkeypatch.setattr(processes, "run", stop_and_run)
        reading = asyncio.create_task(reader.read(long, CLIENT, room(CLIENT)))
        await until(lambda: reading.done() or (bool(stopped) and stopped[0] in processes._busy))
        assert not reading.done()
        [another] = processes.idle
        for client in (CLIENT, OTHER):
            check(await reader.read(FILE, client, room(client)))
        assert not reading.done() and processes.idle == [another]
        shorts = [asyncio.create_task(reader.read(FILE, client, room(client))) for client in (CLIENT, OTHER)]
        os.kill(stopped[0].pid, signal.SIGKILL)
        for each in shorts:
            check(await each)
        found = await reading
        np.testing.assert_array_equal(found.features, expected["input_features"][0])
        assert len(stopped) == 1 and stopped[0].poll() == -signal.SIGKILL

    run(body, 60)


def test_features_are_counted_before_another_file_is_decoded(run: Any) -> None:
    async def body(reader: SoundReader) -> None:
        budget = MemoryBudget(3 * NUM_BYTES, max_wait_s=60, max_waiting=8)
        first, second, third = (HeldMemory(budget, CLIENT) for _ in range(3))
        await first.reserve(NUM_BYTES, "a file")
        check(await reader.read(FILE, CLIENT, first))
        assert first.num_bytes == budget.num_held == NUM_BYTES, "the features alone, not the file"

        await first.reserve(NUM_BYTES, "logits")
        await second.reserve(NUM_BYTES // 2, "a file")
        waiting = asyncio.create_task(reader.read(FILE, CLIENT, second))
        while not budget.num_waiting:
            await asyncio.sleep(0.01)
            assert not waiting.done()
        assert budget.num_held == 2 * NUM_BYTES + NUM_BYTES // 2 and not reader._work
        first.release()
        check(await waiting)
        assert second.num_bytes == budget.num_held == NUM_BYTES
        second.release()

        with pytest.raises(InvalidRequest, match=f"{NUM_BYTES} bytes of memory for features"):
            await reader.read(FILE, CLIENT, HeldMemory(MemoryBudget(NUM_BYTES - 1), CLIENT))

        leaving = asyncio.create_task(reader.read(FILE, CLIENT, third))
        while not reader._work:  # noqa: ASYNC110
            await asyncio.sleep(0)
        leaving.cancel()
        [work] = reader._work
        await asyncio.wait({leaving, work})
        await asyncio.sleep(0)
        assert leaving.cancelled() and budget.num_held == 0

    run(body)


def test_files_that_come_together_leave_room_for_their_features(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A data set at once, of one client: files that wait hold less memory than there is, and features twice as much."""
    num_files, num_bytes = 200, 20_000

    class Processes(FakeProcesses):
        async def run(self, exchange: Any, timeout_s: float, what: str) -> Sound | None:
            await super().run(exchange, timeout_s, what)
            return Sound(np.zeros((2, num_bytes // 4), np.float32), 1.0)

    async def body() -> None:
        reader = SoundReader(tmp_path, 5)
        monkeypatch.setattr(reader, "_processes", Processes())
        budget = MemoryBudget(40 * num_bytes, max_wait_s=60, max_waiting=2 * num_files)

        async def transcribe() -> None:
            held = HeldMemory(budget, CLIENT)
            for _ in range(4):
                await held.reserve_body(BYTES_PER_BODY_BYTE * num_bytes // 4, "its body")
                await asyncio.sleep(0)
            held.give_back(held.num_bytes - num_bytes)  # the form
            await reader.read(b"short", CLIENT, held)
            assert held.num_bytes == 2 * num_bytes
            await asyncio.sleep(0.001)
            held.release()

        await asyncio.gather(*(transcribe() for _ in range(num_files)))
        assert budget.num_held == budget.num_waiting == 0
        await reader.close()

    asyncio.run(asyncio.wait_for(body(), 50))
