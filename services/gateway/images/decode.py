"""A process that decodes pictures for the gateway: `python -m services.gateway.images.decode LAYOUT`.

Whatever a picture does to time or memory, it does to this process alone: the limits below end it, and the gateway
starts another one. LAYOUT is JSON: the class of a layout, and its fields. Standard input has for each picture a line of
JSON, `num_bytes`, `max_pixels`, `is_low`, `worker_resizes` and the `path` of a memory file, and then so many bytes. The
answer is a line of JSON, a `shape` or an `error`, and with a shape its pixels: tiles, or the client's picture if the
worker resizes it. Many pixels are written to the memory file, if there is one, and others follow the line.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict
from threading import Thread
from typing import Any, BinaryIO, Self

from PIL import ExifTags, Image, UnidentifiedImageError

from services.common.errors import InvalidRequest
from services.common.process import keep_freed_blocks
from services.common.vision.layout import Layout, PictureShape, resized_by_worker
from services.common.vision.layouts import layout_of

MAX_CPU_S = 10.0  # for one picture
MAX_MEMORY_BYTES = 3 * 2**30  # of address space
KEPT_BYTES = 2**25  # for the next picture: one of 1,024 x 1,024 takes 10 MB
NICENESS = 5  # streams come first
MIN_FILE_BYTES = 2**16  # of pixels; fewer are one message
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
# What undoes each orientation of EXIF 2.32, section 4.6.4.A, which says where the first row and column belong.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
WHITE = (255, 255, 255)


def main() -> None:
    """Serves until standard input ends."""
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway decides when this process ends
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # nobody reads the answer if the gateway has died
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    keep_freed_blocks(KEPT_BYTES)
    Image.MAX_IMAGE_PIXELS = None  # `read_picture` has a limit of its own
    warnings.simplefilter("ignore")  # of Pillow about files that are slightly wrong
    layout = layout_of(json.loads(sys.argv[1]))
    source, out = sys.stdin.buffer, sys.stdout.buffer
    while line := source.readline():
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # ends the process with SIGPROF
        _answer(out, source.read(asked["num_bytes"]), layout, asked)


def read_picture(
    data: bytes, max_pixels: int, before_pixels: Callable[[Image.Image], None] = lambda picture: None
) -> Image.Image:
    """The picture of a file in RGB, turned as it says, on white where it is transparent.

    before_pixels: is called when its size is known and its pixels are not decoded yet.
    Raises `InvalidRequest` for what is none, or too large, and `MemoryError`.
    """
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = picture.size
        if width * height > max_pixels:
            raise InvalidRequest(
                f"a picture has {width} x {height} pixels, at most {max_pixels} allowed (gateway.max_image_pixels)"
            )
        if getattr(picture, "is_animated", False):
            raise InvalidRequest("a picture has several frames, it must have one: films are not supported")
        before_pixels(picture)
        picture.load()
        turn = TURNS.get(_orientation_of(picture))
        return _to_rgb(picture if turn is None else picture.transpose(turn))
    except UnidentifiedImageError:
        raise InvalidRequest(f"a picture of {len(data)} bytes is none of {', '.join(FORMATS)}") from None
    except (InvalidRequest, MemoryError):
        raise
    except Exception as error:  # Pillow has no list of what it raises for files that are cut off or damaged
        raise InvalidRequest(f"a picture cannot be decoded: {error}") from error


def _orientation_of(picture: Image.Image) -> object:
    """The number that a file has for it, or whatever it has instead; None without one."""
    try:
        return picture.getexif().get(ExifTags.Base.Orientation)
    except MemoryError:
        raise
    except Exception:  # as above; the pixels can be shown as they are, which is what other programs do, too
        return None


def _to_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode.startswith("I;16"):  # `convert` would make everything above 255 white
        return picture.point(lambda value: value * (1 / 256)).convert("L").convert("RGB")
    if not picture.has_transparency_data:
        return picture if picture.mode == "RGB" else picture.convert("RGB")
    with_alpha = picture.convert("RGBA")  # whose colours below the alpha are arbitrary, mostly black
    on_white = Image.new("RGB", picture.size, WHITE)
    on_white.paste(with_alpha, mask=with_alpha.getchannel("A"))
    return on_white


def _answer(out: BinaryIO, data: bytes, layout: Layout, asked: dict[str, Any]) -> None:
    def shape_of(picture: Image.Image) -> PictureShape:
        shape = layout.shape_of(picture.height, picture.width, is_low=asked["is_low"])
        return resized_by_worker(layout, shape) if asked["worker_resizes"] else shape

    def reserve(picture: Image.Image) -> None:
        if (shape := shape_of(picture)).resample is not None:  # what is decoded is what is written
            file.reserve(shape.num_bytes)

    with _PixelFile(asked["path"]) as file:
        try:
            picture = read_picture(data, asked["max_pixels"], reserve)
            shape = shape_of(picture)
            tiles = layout.tiles_of(picture, shape) if shape.resample is None else [picture]
        except (InvalidRequest, MemoryError) as error:
            _write(out, {"error": str(error) or "a picture needs more memory than there is for decoding"})
            return
        _, height, width, _ = shape.pixels_shape
        assert all(tile.size == (width, height) for tile in tiles), "as the shape says"
        pixels: Iterable[bytes] = (tile.tobytes() for tile in tiles)
        if is_in_file := file.takes(shape.num_bytes):
            file.write(pixels)
            pixels = ()
    _write(out, {"shape": asdict(shape), "is_in_file": is_in_file}, pixels)


class _PixelFile:
    """The gateway's memory file for pixels, if it has given one and the system lets a process open those of others."""

    def __init__(self, path: str) -> None:
        self._file = _open(path) if path else None
        self._beside: Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._join()
        if self._file is not None:
            self._file.close()

    def takes(self, num_bytes: int) -> bool:
        """Whether so many are written to it."""
        return self._file is not None and num_bytes >= MIN_FILE_BYTES

    def reserve(self, num_bytes: int) -> None:
        """Gives the file its memory on a thread of its own, which takes the kernel as long as to fill it."""
        if self._file is not None and self.takes(num_bytes):
            self._beside = Thread(target=_allocate, args=(self._file.fileno(), num_bytes))
            self._beside.start()

    def write(self, pixels: Iterable[bytes]) -> None:
        """All that the file has."""
        assert self._file is not None, "it takes them"
        self._join()
        self._file.writelines(pixels)
        self._file.truncate()  # there may have been room for more

    def _join(self) -> None:
        if self._beside is not None:
            self._beside.join()


def _open(path: str) -> BinaryIO | None:
    try:
        return open(path, "r+b")
    except OSError:
        return None


def _allocate(file: int, num_bytes: int) -> None:
    with contextlib.suppress(OSError):  # which then is raised by who writes
        os.posix_fallocate(file, 0, num_bytes)


def _write(out: BinaryIO, head: dict[str, Any], rest: Iterable[bytes] = ()) -> None:
    out.write(json.dumps(head).encode() + b"\n")
    out.writelines(rest)
    out.flush()


if __name__ == "__main__":
    main()
