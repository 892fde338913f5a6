"""`ReceivedPictures`: the pixels that gateways send, in parts, before the sequences that have them. Event loop."""

from __future__ import annotations

import os
from weakref import WeakValueDictionary

import structlog
import torch

from services.common.errors import InvalidRequest, RequestAborted
from services.common.memory_file import open_memory_file
from services.common.vision.layout import PictureShape
from services.dense_worker.encoders.vision.picture import Picture
from services.pb import images_pb2
from services.step import SequenceSpec

log = structlog.get_logger()


class ReceivedPictures:
    """Sequences with equal pictures share them, for as long as one of them has them."""

    def __init__(self) -> None:
        # Pixels by hash, of each stream; or their file, if it could not be opened: it is tried again for each sequence.
        self._streams: dict[int, dict[str, bytearray | torch.Tensor | images_pb2.MemoryFile]] = {}
        self._pictures: WeakValueDictionary[str, Picture] = WeakValueDictionary()  # by hash

    def receive(self, part: images_pb2.PicturePart, stream: int) -> None:
        """Keeps a part, and forgets what the gateway says."""
        pixels = self._streams.setdefault(stream, {})
        for each in part.forgotten:
            pixels.pop(each.hex(), None)
        name = part.hash.hex()
        if part.HasField("file"):
            pixels[name] = _map(part.file)
        else:
            values = pixels.setdefault(name, bytearray())
            assert isinstance(values, bytearray), "a picture comes in one way"
            values.extend(part.values)

    def end_stream(self, stream: int) -> None:
        """Forgets what a stream has sent."""
        self._streams.pop(stream, None)

    def find(self, spec: SequenceSpec, message: bytes, stream: int) -> tuple[Picture, ...]:
        """The pictures of a sequence, one for each of its spans; message: of its feature.

        Raises `InvalidRequest` for a message that no gateway writes, and `RequestAborted` if a picture was not sent.
        """
        shapes = images_pb2.Pictures.FromString(message).shapes
        if len(shapes) != len(spec.spans):
            raise InvalidRequest(f"the prompt has {len(spec.spans)} spans and {len(shapes)} pictures", "messages")
        found = []
        for span, each in zip(spec.spans, shapes, strict=True):
            shape = PictureShape(
                each.num_tiles,
                each.height,
                each.width,
                each.original_height,
                each.original_width,
                span.num_tokens,
                span.grid_rows,
                span.grid_columns,
                each.resample if each.HasField("resample") else None,
            )
            found.append(self.one(span.hash, shape, stream))
        return tuple(found)

    def one(self, picture_hash: str, shape: PictureShape, stream: int) -> Picture:
        """A picture that a stream has sent. Raises `RequestAborted` if it has not."""
        picture = self._pictures.get(picture_hash)
        if picture is None:
            of_stream = self._streams.get(stream, {})
            pixels = of_stream.get(picture_hash, b"")
            if isinstance(pixels, images_pb2.MemoryFile):
                pixels = of_stream[picture_hash] = _map(pixels)
            if isinstance(pixels, images_pb2.MemoryFile):
                raise RequestAborted(f"picture {picture_hash[:16]}: its file cannot be read, see the worker's log")
            if len(pixels) != shape.num_bytes:
                raise RequestAborted(
                    f"picture {picture_hash[:16]} has {shape.num_bytes} bytes, {len(pixels)} have been sent"
                )
            values = pixels if isinstance(pixels, torch.Tensor) else torch.frombuffer(pixels, dtype=torch.uint8)
            picture = Picture(picture_hash, shape, values.view(shape.pixels_shape))
            self._pictures[picture_hash] = picture
        return picture


def _map(message: images_pb2.MemoryFile) -> torch.Tensor | images_pb2.MemoryFile:
    """The bytes of a gateway's file, uint8 [num_bytes], which are not copied; the message if it cannot be mapped."""
    try:
        file = open_memory_file(message)
        try:
            return torch.from_file(f"/proc/self/fd/{file}", shared=False, size=message.num_bytes, dtype=torch.uint8)
        finally:
            os.close(file)
    except (OSError, RuntimeError) as error:  # the second from torch
        log.warning("pixels of the gateway cannot be read", reason=str(error))
        return message
