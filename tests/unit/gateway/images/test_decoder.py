"""Decoding pictures: Pillow and transformers give the expected pixels; what is hostile harms no other request."""

from __future__ import annotations

import asyncio
import errno
import gc
import io
import os
import signal
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from services.common.errors import CapacityError, InvalidRequest
from services.common.memory_file import MemoryFile, can_read
from services.common.vision.qwen_vl import QwenLayout
from services.gateway.images import decoder
from services.gateway.images.decoder import Decoder, Encoding
from services.gateway.images.picture import Picture
from services.gateway.images.sources import PictureFile
from services.gateway.resources import piped_processes
from services.gateway.resources.memory_budget import HeldMemory, MemoryBudget
from tests.support.dense.vision_models import noise
from tests.support.running_gateway import until

LAYOUT = QwenLayout(unit=8, min_pixels=64, max_pixels=4096, resample=3)
CLIENT = (0, 1)
NOBODY = (0, 0)  # is never refused because of what it holds itself
HELD = HeldMemory(MemoryBudget(2**30), CLIENT)


def encode(picture: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def encoding(data: bytes, is_low: bool = False, worker_resizes: bool = False) -> Encoding:
    return Encoding(PictureFile.of(data), is_low, worker_resizes)


class Runner:
    def __init__(self, max_kept_bytes: int = 0) -> None:
        self.loop = asyncio.new_event_loop()
        self.decoder = Decoder(LAYOUT, 10_000, max_kept_bytes)

    def decode_together(self, files: list[bytes]) -> list[Picture]:
        async def main() -> list[Picture]:
            decode, waiting = self.decoder.decode, asyncio.Lock()
            return await asyncio.gather(*(decode(encoding(data), CLIENT, HELD, waiting) for data in files))

        return self.loop.run_until_complete(main())

    def decode(self, data: bytes, *, is_low: bool = False) -> Picture:
        return self.loop.run_until_complete(self.decoder.decode(encoding(data, is_low), CLIENT, HELD, asyncio.Lock()))


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    runner = Runner()
    yield runner
    runner.loop.run_until_complete(runner.decoder.close())
    runner.loop.close()


def check(found: Picture, picture: Image.Image) -> None:
    shape = LAYOUT.shape_of(picture.height, picture.width, is_low=False)
    assert found.shape == shape
    expected = picture.convert("RGB").resize((shape.width, shape.height), Image.Resampling.BICUBIC)
    assert found.pixels[:] == np.asarray(expected).tobytes()


def test_while_no_process_can_be_started_a_picture_is_refused_as_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    runner = Runner()
    monkeypatch.setattr(piped_processes.subprocess, "Popen", refuse)
    with pytest.raises(CapacityError, match=r"decodes pictures cannot be started: .*unavailable"):
        runner.decode(encode(noise(40, 40, 1)))
    runner.loop.run_until_complete(runner.decoder.close())
    runner.loop.close()


def test_without_memory_files_pixels_come_through_a_pipe(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    picture = noise(40, 24, seed=1)
    found = runner.decode(encode(picture))
    check(found, picture)
    assert not isinstance(found.pixels, MemoryFile)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "WEBP", "GIF", "JPEG"])
def test_formats(runner: Runner, kind: str) -> None:
    data = encode(noise(30, 50, 1), kind, **({"lossless": True} if kind == "WEBP" else {}))
    check(runner.decode(data), Image.open(io.BytesIO(data)))


@pytest.mark.parametrize("mode", ["L", "P", "1", "CMYK"])
def test_colours(runner: Runner, mode: str) -> None:
    data = encode(noise(20, 20, 2).convert(mode), "JPEG" if mode == "CMYK" else "PNG")
    check(runner.decode(data), Image.open(io.BytesIO(data)))


def test_grey_of_16_bits_keeps_its_upper_8(runner: Runner) -> None:
    values = (np.arange(400, dtype=np.uint16) * 164).reshape(20, 20)
    expected = np.stack([values >> 8] * 3, axis=-1).astype(np.uint8)
    check(runner.decode(encode(Image.fromarray(values))), Image.fromarray(expected))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB"])
def test_what_is_transparent_is_white(runner: Runner, mode: str) -> None:
    """The colour of a pixel and white, in the shares that alpha says: 8.3 of the PNG specification, third edition."""
    colours = np.asarray(noise(20, 20, 6))
    alpha = np.tile(np.array([0, 64, 200, 255], dtype=np.uint8), (20, 5))
    picture, options = Image.fromarray(colours), {}
    if mode in ("RGBA", "LA"):
        picture = Image.fromarray(np.dstack([colours, alpha]), "RGBA").convert(mode)
        colours = np.asarray(picture.convert("RGB"))
    else:  # one colour is transparent, and all others are not
        picture = Image.new(mode, (20, 20))
        picture.paste(255, (0, 0, 20, 5))
        alpha = np.where(np.arange(20)[:, None] < 5, 255, 0).astype(np.uint8).repeat(20, axis=1)
        options = {"transparency": 0 if mode == "P" else (0, 0, 0)}
        colours = np.asarray(picture.convert("RGB"))
    share = alpha[..., None].astype(np.float64) / 255
    expected = np.floor(colours * share + 255 * (1 - share) + 0.5).astype(np.uint8)
    check(runner.decode(encode(picture, "PNG", **options)), Image.fromarray(expected))


@pytest.mark.parametrize("orientation", range(10))
def test_a_picture_is_turned_as_its_file_says(runner: Runner, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(noise(16, 48, 3), "PNG", exif=exif)
    turned = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert turned.size == ((16, 48) if 5 <= orientation <= 8 else (48, 16))
    check(runner.decode(data), turned)


def exif_of(*entries: bytes) -> bytes:
    """A directory of EXIF data, in the bytes of a TIFF file."""
    return b"Exif\0\0MM\0*" + struct.pack(">IH", 8, len(entries)) + b"".join(entries) + bytes(4)


TURN = struct.pack(">HHIHH", 0x0112, 3, 1, 6, 0)


@pytest.mark.parametrize(
    ("exif", "turn"),
    [
        # A width that is a text. Pillow reads it, but cannot write it.
        (exif_of(struct.pack(">HHI4s", 0x0100, 2, 4, b"abc\0"), TURN), 270),
        (exif_of(struct.pack(">HHI4s", 0x0112, 2, 4, b"abc\0")), 0),
        (exif_of(TURN)[:20], 0),
        (b"Exif\0\0no TIFF file", 0),
    ],
)
def test_exif_data_that_are_wrong_harm_no_picture(runner: Runner, exif: bytes, turn: int) -> None:
    data = encode(noise(16, 48, 7), "WEBP", lossless=True, exif=exif)
    check(runner.decode(data), noise(16, 48, 7).rotate(turn, expand=True))


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(side: int) -> bytes:
    """A PNG of a few bytes that claims a great many pixels."""
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def film(num_frames: int) -> bytes:
    """A GIF whose frames are a black pixel each. Pillow takes seconds to write thousands of them."""
    head = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(3) + b"\xff" * 3  # two colours
    frame = b"," + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\0"  # clear, black, end
    return head + frame * num_frames + b";"


PNG = encode(noise(40, 40, 4))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is none of PNG"),
        (b"\0" * 100, "is none of PNG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is none of PNG"),
        (b"%PDF-1.7", "is none of PNG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is none of PNG"),
        (encode(noise(8, 8, 5), "TIFF"), "is none of PNG"),
        (PNG[: len(PNG) // 2], "cannot be decoded"),
        (PNG[:30], "is none of PNG|cannot be decoded"),
        (PNG[:60] + b"\xff" * 40 + PNG[100:], "cannot be decoded"),
        (encode(noise(40, 40, 4), "JPEG")[:300], "is none of PNG|cannot be decoded"),
        (bomb(100_000), "100000 x 100000 pixels, at most 10000 allowed"),
        (bomb(90), "cannot be decoded"),
        (encode(Image.new("RGB", (101, 100))), "101 x 100 pixels, at most 10000"),
        (encode(Image.new("RGB", (1000, 4))), "longer side may be 200 times"),
        (film(2), "several frames"),
        (film(10_000), "several frames"),
    ],
)
def test_hostile_pictures(runner: Runner, data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        runner.decode(data)
    check(runner.decode(PNG), noise(40, 40, 4))


def test_little_detail(runner: Runner) -> None:
    layout = QwenLayout(unit=8, min_pixels=64, max_pixels=2**22, resample=3)
    assert layout.shape_of(2000, 1000, is_low=True).num_bytes <= 3 * 512 * 512
    assert layout.shape_of(2000, 1000, is_low=False).num_bytes > 3 * 10**6


def test_a_file_that_comes_again_is_not_decoded_again(runner: Runner) -> None:
    files = [encode(noise(24, 24, seed)) for seed in range(3)]
    kept = Runner(max_kept_bytes=2 * 3 * 24 * 24)
    first = [kept.decode(data) for data in files[:2]]
    assert [kept.decode(data) for data in files[:2]] == first
    assert all(kept.decode(data) is picture for data, picture in zip(files, first, strict=False))
    kept.decode(files[2])
    assert kept.decode(files[1]) is first[1] and kept.decode(files[0]) is not first[0], "the oldest made room"
    assert kept.decode(files[0], is_low=True).pixels == first[0].pixels
    kept.loop.run_until_complete(kept.decoder.close())
    kept.loop.close()


def test_large_pictures_are_in_files_of_which_there_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 3
    monkeypatch.setattr(decoder, "MAX_FILES", most)
    layout = QwenLayout(unit=8, min_pixels=64, max_pixels=2**20, resample=3)
    loop, large = asyncio.new_event_loop(), Decoder(layout, 2**20, max_kept_bytes=2**26)

    def decode(*seeds: int) -> list[Picture]:
        async def main() -> list[Picture]:
            encoded = [encoding(encode(noise(160, 152, seed))) for seed in seeds]
            return await asyncio.gather(*(large.decode(each, CLIENT, HELD, asyncio.Lock()) for each in encoded))

        return loop.run_until_complete(main())

    def count(pictures: list[Picture]) -> int:
        return sum(isinstance(each.pixels, MemoryFile) for each in pictures)

    try:
        found = decode(1)
        assert count(found) == 1 and found[0].pixels[:] == noise(160, 152, 1).tobytes()
        described = found[0].pixels.describe()
        assert can_read(described)
        del found
        assert can_read(described), "it is kept for the next turn of a chat"
        found = decode(2, 3, 4, 5, 6)
        assert count(found) == most and not can_read(described), "those that are kept made room for it"
        for seed, each in enumerate(found, 2):
            assert each.pixels[:] == noise(160, 152, seed).tobytes()
        del found, each
        assert count(decode(7)) == 1
        small = large.decode(encoding(PNG), CLIENT, HELD, asyncio.Lock())
        assert isinstance(loop.run_until_complete(small).pixels, bytes)
    finally:
        loop.run_until_complete(large.close())
        loop.close()


def test_a_killed_process_is_replaced_and_clients_see_nothing(runner: Runner) -> None:
    runner.decode_together([PNG, PNG])
    processes = list(runner.decoder._processes.idle)
    assert len(processes) >= piped_processes.MAX_KILLS, "a request that met them one by one would be refused"
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody knows its status yet
    check(runner.decode(PNG), noise(40, 40, 4))
    assert not set(processes) & set(runner.decoder._processes.idle)


def test_a_picture_that_takes_too_long_is_given_up(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    runner.decode(PNG)
    stopped = list(runner.decoder._processes.idle)
    for process in stopped:
        os.kill(process.pid, signal.SIGSTOP)
    monkeypatch.setattr(decoder, "TIMEOUT_S", 0.2)
    with pytest.raises(Exception, match=r"within 0\.2 s"):
        runner.decode(PNG)
    monkeypatch.undo()
    for process in stopped:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGCONT)
    check(runner.decode(PNG), noise(40, 40, 4))


def test_pictures_for_which_there_is_no_memory_are_not_kept(runner: Runner) -> None:
    files = [encode(noise(24, 24, 10 + seed)) for seed in range(6)]
    budget = MemoryBudget(3 * 24 * 24, max_wait_s=60.0, max_waiting=len(files))  # for one of them
    others = HeldMemory(budget, NOBODY)
    others.add(budget.max_bytes)

    async def decode(data: bytes) -> Picture:
        held = HeldMemory(budget, NOBODY)
        picture = await runner.decoder.decode(encoding(data), NOBODY, held, asyncio.Lock())
        assert held.num_bytes == len(picture.pixels)
        held.release()
        return picture

    async def main() -> list[Picture]:
        num_before = num_pictures()
        tasks = [asyncio.create_task(decode(data)) for data in files]
        async with asyncio.timeout(60):
            await until(lambda: budget.num_waiting == len(files))
        assert num_pictures() == num_before
        others.release()
        return await asyncio.gather(*tasks)

    for seed, picture in enumerate(runner.loop.run_until_complete(main())):
        check(picture, noise(24, 24, 10 + seed))
    assert budget.num_held == 0


def num_pictures() -> int:
    gc.collect()  # what earlier tests have left
    return sum(isinstance(each, Picture) for each in gc.get_objects())


def test_a_process_that_cannot_open_the_file_sends_the_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryFile, "path", "/proc/self/fd/of another process")
    loop, large = asyncio.new_event_loop(), Decoder(QwenLayout(8, 64, 2**20, 3), 2**20)
    try:
        data = encode(noise(160, 152, 1))
        found = loop.run_until_complete(large.decode(encoding(data), CLIENT, HELD, asyncio.Lock()))
        assert found.pixels == noise(160, 152, 1).tobytes()
    finally:
        loop.run_until_complete(large.close())
        loop.close()


def test_the_next_picture_takes_the_memory_of_the_last() -> None:
    """Otherwise each one of a megapixel costs thousands of page faults, which take as long as decoding it."""
    loop, layout = asyncio.new_event_loop(), QwenLayout(8, 64, 2**22, 3)
    large = Decoder(layout, 2**22)
    files = [encode(Image.new("RGB", (1000, 1000), (seed, 0, 0)), "JPEG") for seed in range(8)]
    try:
        num_faults = []
        for data in files:
            loop.run_until_complete(large.decode(encoding(data, worker_resizes=True), CLIENT, HELD, asyncio.Lock()))
            [process] = large._processes.idle
            num_faults.append(int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[7]))
        assert num_faults[-1] - num_faults[3] < 4 * 250, "its pixels alone have 1,700 pages"
    finally:
        loop.run_until_complete(large.close())
        loop.close()
