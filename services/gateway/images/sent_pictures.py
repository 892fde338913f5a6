"""`SentPictures`: which pictures a worker has of one stream, so that it gets each of them once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from services.gateway.images.picture import Picture
from services.pb import dense_pb2, images_pb2

MAX_PART_BYTES = 2**16  # of a picture in one message: gRPC sends larger ones more slowly
MAX_KEPT_BYTES = 64 * 2**20  # of pictures that a worker keeps for a stream; one request may have more


class SentPictures:
    """Of one stream, from its beginning. Event loop."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[str, int] = OrderedDict()  # bytes by hash, the least recently used first
        self._num_bytes = 0

    def parts_for(self, pictures: Sequence[Picture]) -> Iterator[dense_pb2.GatewayMessage]:
        """The messages that the worker needs before a sequence with these pictures. All of them have to be sent."""
        for picture in {each.hash: each for each in pictures}.values():
            if picture.hash in self._sizes:
                self._sizes.move_to_end(picture.hash)
                continue
            self._sizes[picture.hash] = len(picture.pixels)
            self._num_bytes += len(picture.pixels)
            forgotten = self._forget({each.hash for each in pictures})
            for start in range(0, len(picture.pixels), MAX_PART_BYTES):
                values = picture.pixels[start : start + MAX_PART_BYTES]
                part = images_pb2.PicturePart(hash=bytes.fromhex(picture.hash), values=values, forgotten=forgotten)
                yield dense_pb2.GatewayMessage(picture_part=part)
                forgotten = []

    def _forget(self, needed: set[str]) -> list[bytes]:
        """The hashes of pictures that make room for the newest one."""
        forgotten = []
        for name in [each for each in self._sizes if each not in needed]:
            if self._num_bytes <= MAX_KEPT_BYTES:
                break
            self._num_bytes -= self._sizes.pop(name)
            forgotten.append(bytes.fromhex(name))
        return forgotten
