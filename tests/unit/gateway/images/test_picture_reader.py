"""`PictureReader.reading`: what goes on while the last picture of a message is decoded, and what ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from services.common.config import GatewaySection
from services.common.errors import InvalidRequest
from services.common.vision.vision_config import load_vision_config
from services.gateway.images.decoder import Encoding
from services.gateway.images.picture_reader import MAX_AT_ONCE, PictureReader
from services.gateway.resources.memory_budget import HeldMemory, MemoryBudget
from services.pb import gateway_pb2
from tests.support.dense.vision_models import make_vision_model


class Decoder:
    """Gives the bytes back when `may_end` is set."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = asyncio.Event(), asyncio.Event()  # the second picture
        self.begun, self.ended = list[bytes](), list[bytes]()
        self.was_cancelled = False

    async def decode(self, encoded: Encoding, client: object, held: object, waiting: object) -> bytes:
        self.begun.append(encoded.file.data)
        try:
            if len(self.begun) == 2:
                self.has_begun.set()
                await self.may_end.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if encoded.file.data == b"broken":
            raise InvalidRequest("broken", "messages")
        self.ended.append(encoded.file.data)
        return encoded.file.data

    async def close(self) -> None:
        pass


def run(tmp_path: Path, second: bytes, within: Callable[..., Awaitable[None]]) -> Decoder:
    """Runs `within` the context for a message of two pictures."""
    vision = load_vision_config(make_vision_model(tmp_path, "qwen2_5_vl"))
    assert vision is not None

    async def read() -> Decoder:
        reader, decoder = PictureReader(replace(vision, tower=None), GatewaySection(), None), Decoder()  # type: ignore[arg-type]
        reader._decoder = decoder  # type: ignore[assignment]
        message = gateway_pb2.GenerateRequest()
        for data in (b"first", second):
            message.pictures.add(data=data)
        held = HeldMemory(MemoryBudget(2**20), 0)
        async with reader.reading(message, 0, held) as reading:
            await within(reading, message, decoder)
        return decoder

    return asyncio.run(asyncio.wait_for(read(), 60))


def test_the_last_picture_is_decoded_beside_what_is_within(tmp_path: Path) -> None:
    async def within(reading: Awaitable[list[bytes]], message: gateway_pb2.GenerateRequest, decoder: Decoder) -> None:
        assert not any(each.data for each in message.pictures), "nothing else reads their bytes"
        assert decoder.has_begun.is_set(), "before the text is tokenized, meanwhile nothing could begin"
        assert decoder.ended == [b"first"]
        decoder.may_end.set()
        assert await reading == [b"first", b"second"]

    run(tmp_path, b"second", within)


def test_a_picture_that_is_refused_ends_what_waits_for_it(tmp_path: Path) -> None:
    async def within(reading: Awaitable[list[bytes]], message: object, decoder: Decoder) -> None:
        decoder.may_end.set()
        await reading

    with pytest.raises(InvalidRequest, match="broken"):
        run(tmp_path, b"broken", within)


def test_a_text_that_is_refused_lets_the_process_that_decodes_go_on(tmp_path: Path) -> None:
    found: list[Decoder] = []

    async def within(reading: object, message: object, decoder: Decoder) -> None:
        found.append(decoder)
        asyncio.get_running_loop().call_later(0.05, decoder.may_end.set)
        raise InvalidRequest("too long", "messages")

    with pytest.raises(InvalidRequest, match="too long"):
        run(tmp_path, b"second", within)
    assert found[0].ended == [b"first", b"second"] and not found[0].was_cancelled


def test_a_request_that_is_cancelled_cancels_its_picture(tmp_path: Path) -> None:
    found: list[Decoder] = []

    async def within(reading: Awaitable[list[bytes]], message: object, decoder: Decoder) -> None:
        found.append(decoder)
        await decoder.has_begun.wait()
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_soon(task.cancel)
        await asyncio.sleep(60)

    with pytest.raises(asyncio.CancelledError):
        run(tmp_path, b"second", within)
    assert found[0].was_cancelled


class SlowDecoder(Decoder):
    """Ends what it has begun when all may go on; `most`: as many were under way at once."""

    def __init__(self) -> None:
        super().__init__()
        self.num_running = self.most = 0

    async def decode(self, encoded: Encoding, client: object, held: object, waiting: object) -> bytes:
        self.begun.append(encoded.file.data)
        self.num_running += 1
        self.most = max(self.most, self.num_running)
        for _ in range(50):  # iterations of the loop, in which others begin if they may
            await asyncio.sleep(0.001)
        self.num_running -= 1
        if encoded.file.data == b"broken":
            raise InvalidRequest("broken", "messages")
        self.ended.append(encoded.file.data)
        return encoded.file.data


def read_all(tmp_path: Path, files: list[bytes]) -> tuple[SlowDecoder, list[bytes] | InvalidRequest]:
    vision = load_vision_config(make_vision_model(tmp_path, "qwen2_5_vl"))
    assert vision is not None

    async def read() -> tuple[SlowDecoder, list[bytes] | InvalidRequest]:
        reader, decoder = PictureReader(replace(vision, tower=None), GatewaySection(), None), SlowDecoder()  # type: ignore[arg-type]
        reader._decoder = decoder  # type: ignore[assignment]
        message = gateway_pb2.GenerateRequest()
        for data in files:
            message.pictures.add(data=data)
        try:
            async with reader.reading(message, 0, HeldMemory(MemoryBudget(2**20), 0)) as reading:  # type: ignore[arg-type]
                return decoder, await reading  # type: ignore[return-value]
        except InvalidRequest as error:
            assert not decoder.num_running, "those beside it have ended"
            return decoder, error

    return asyncio.run(asyncio.wait_for(read(), 60))


def test_a_few_pictures_are_decoded_beside_each_other_and_equal_ones_once(tmp_path: Path) -> None:
    files = [b"%d" % (index % 9) for index in range(16)]
    decoder, found = read_all(tmp_path, files)
    assert found == files, "in their order"
    assert decoder.most == MAX_AT_ONCE and sorted(decoder.begun) == sorted(set(files))


@pytest.mark.parametrize("place", [0, 6])
def test_after_a_picture_that_is_refused_no_others_begin(tmp_path: Path, place: int) -> None:
    files = [b"%d" % index for index in range(12)]
    files[place] = b"broken"
    decoder, found = read_all(tmp_path, files)
    assert isinstance(found, InvalidRequest) and len(decoder.begun) <= place + MAX_AT_ONCE
