"""Processes that decode sound: who kills them or leaves harms no other file."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor, WhisperProcessor

from services.common.errors import CapacityError, InvalidRequest
from services.gateway.resources.memory_budget import HeldMemory, MemoryBudget
from services.gateway.sound import sound_reader
from services.gateway.sound.decode import read_sound
from services.gateway.sound.sound_reader import Sound, SoundReader
from tests.support.speech import NUM_MEL_BINS, PIECES, RATE, WINDOW_S, byte_tokenizer, sound_file, sound_of

CLIENT, OTHER = (0, 1), (0, 2)
FILE = sound_file(sound_of(0.4))
NUM_BYTES = NUM_MEL_BINS * 100 * 4  # of its features


def room(client: tuple[int, int]) -> HeldMemory:
    return HeldMemory(MemoryBudget(2**20), client)


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Callable[[SoundReader], Coroutine[Any, Any, None]]], None]:
    extractor = WhisperFeatureExtractor(feature_size=NUM_MEL_BINS, sampling_rate=RATE, chunk_length=WINDOW_S)
    extractor.save_pretrained(tmp_path)

    def run(body: Callable[[SoundReader], Awaitable[None]]) -> None:
        async def run_body() -> None:
            reader = SoundReader(tmp_path, 5)
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
        [killed] = reader._processes.idle
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        check(await reader.read(FILE, CLIENT, room(CLIENT)))

        [process] = reader._processes.idle
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
