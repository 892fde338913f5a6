"""A process that decodes pictures for the gateway: `python -m services.gateway.images.decode LAYOUT`.

Whatever a picture does to time or memory, it does to this process alone: the limits below end it, and the gateway
starts another one. LAYOUT is JSON: the class of a layout, and its fields. Standard input has for each picture a line of
JSON, `num_bytes`, `max_pixels` and `is_low`, and then so many bytes. The answer is a line of JSON, a `shape` or an
`error`, and with a shape its tiles: a byte for each of red, green and blue.
"""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import sys
import warnings
from dataclasses import asdict
from typing import Any, BinaryIO

from PIL import Image, ImageOps, UnidentifiedImageError

from services.common.errors import InvalidRequest
from services.common.vision.layout import Layout, PictureShape
from services.common.vision.layouts import layout_of

MAX_CPU_S = 10.0  # for one picture
MAX_MEMORY_BYTES = 3 * 2**30  # of address space
NICENESS = 5  # streams come first
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def main() -> None:
    """Serves until standard input ends."""
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway decides when this process ends
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    Image.MAX_IMAGE_PIXELS = None  # `read_picture` has a limit of its own
    warnings.simplefilter("ignore")  # of Pillow about files that are slightly wrong
    layout = layout_of(json.loads(sys.argv[1]))
    source, out = sys.stdin.buffer, sys.stdout.buffer
    while line := source.readline():
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # ends the process with SIGPROF
        _answer(out, source.read(asked["num_bytes"]), layout, asked)


def read_picture(data: bytes, max_pixels: int) -> Image.Image:
    """The picture of a file in RGB, turned as it says. Raises `InvalidRequest` for what is none, or too large."""
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = picture.size
        if width * height > max_pixels:
            raise InvalidRequest(
                f"a picture has {width} x {height} pixels, at most {max_pixels} allowed (gateway.max_image_pixels)"
            )
        if getattr(picture, "is_animated", False):
            raise InvalidRequest("a picture has several frames, it must have one: films are not supported")
        turned = ImageOps.exif_transpose(picture)
        return turned.convert("RGB")
    except UnidentifiedImageError:
        raise InvalidRequest(f"a picture of {len(data)} bytes is none of {', '.join(FORMATS)}") from None
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, OverflowError) as error:
        # Pillow's decoders raise all of these for files that are cut off or damaged.
        raise InvalidRequest(f"a picture cannot be decoded: {error}") from error


def _answer(out: BinaryIO, data: bytes, layout: Layout, asked: dict[str, Any]) -> None:
    try:
        picture = read_picture(data, asked["max_pixels"])
        shape = layout.shape_of(picture.height, picture.width, is_low=asked["is_low"])
        tiles = layout.tiles_of(picture, shape)
    except (InvalidRequest, MemoryError) as error:
        _write(out, {"error": str(error) or "a picture needs more memory than there is for decoding"})
        return
    assert all(tile.size == (shape.width, shape.height) for tile in tiles), "as the shape says"
    _write(out, {"shape": asdict(shape)}, *(tile.tobytes() for tile in tiles))


def _write(out: BinaryIO, head: dict[str, Any], *rest: bytes) -> None:
    out.write(json.dumps(head).encode() + b"\n")
    for each in rest:
        out.write(each)
    out.flush()


def shape_from(fields: dict[str, Any]) -> PictureShape:
    """The shape of an answer."""
    return PictureShape(**fields)


if __name__ == "__main__":
    main()
