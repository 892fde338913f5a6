"""`SentParts`: what a worker has of one stream beside sequences, so that it gets each picture and each table once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from services.common.memory_file import MemoryFile
from services.gateway.images.picture import Picture
from services.gateway.request.generation_request import GenerationRequest
from services.lora.prompt_embeds import PromptEmbeds
from services.pb import dense_pb2, images_pb2

MAX_PART_BYTES = 2**16  # of a picture in one message: gRPC sends larger ones more slowly
MAX_TABLE_PART_BYTES = 2**20  # of a table of vectors in one message: about a millisecond
# Of pictures that a worker keeps for a stream; one request may have more.
MAX_KEPT_BYTES = 64 * 2**20
MAX_KEPT_FILES = 32


class SentParts:
    """Of one stream, from its beginning. Event loop."""

    def __init__(self, *, shares_memory: bool) -> None:
        """shares_memory: the worker can read memory files of this process"""
        self._shares_memory = shares_memory
        # Bytes by hash, the least recently used first. A file stays open for the worker to open it, maybe after the end
        # of its request; from then on the worker has it mapped, so that it takes no further memory.
        self._sent: OrderedDict[str, tuple[int, MemoryFile | None]] = OrderedDict()
        self._num_bytes = self._num_files = 0
        self._table_hash = ""  # of the table that the worker has

    def before(self, request: GenerationRequest) -> Iterator[dense_pb2.GatewayMessage]:
        """The messages that the worker needs before a sequence of this request. All of them have to be sent."""
        table = request.prompt_embeds
        if table is not None and table.hash != self._table_hash:
            yield from _table_parts(table)
            self._table_hash = table.hash
        yield from self.before_pictures(request.pictures)

    def before_pictures(self, pictures: Sequence[Picture]) -> Iterator[dense_pb2.GatewayMessage]:
        """Those that a sequence with these pictures needs."""
        for picture in {each.hash: each for each in pictures}.values():
            if picture.hash in self._sent:
                self._sent.move_to_end(picture.hash)
                continue
            pixels, num_bytes = picture.pixels, len(picture.pixels)
            file = pixels if self._shares_memory and isinstance(pixels, MemoryFile) else None
            self._sent[picture.hash] = num_bytes, file
            self._num_bytes += num_bytes
            self._num_files += file is not None
            name, forgotten = bytes.fromhex(picture.hash), self._forget({each.hash for each in pictures})
            if file is not None:
                part = images_pb2.PicturePart(hash=name, file=file.describe(), forgotten=forgotten)
                yield dense_pb2.GatewayMessage(picture_part=part)
                continue
            for start in range(0, num_bytes, MAX_PART_BYTES):
                values = pixels[start : start + MAX_PART_BYTES]
                part = images_pb2.PicturePart(hash=name, values=values, forgotten=forgotten)
                yield dense_pb2.GatewayMessage(picture_part=part)
                forgotten = []

    def _forget(self, needed: set[str]) -> list[bytes]:
        """The hashes of pictures that make room for the newest one."""
        forgotten = []
        for name in [each for each in self._sent if each not in needed]:
            if self._num_bytes <= MAX_KEPT_BYTES and self._num_files <= MAX_KEPT_FILES:
                break
            num_bytes, file = self._sent.pop(name)
            self._num_bytes -= num_bytes
            self._num_files -= file is not None
            forgotten.append(bytes.fromhex(name))
        return forgotten


def _table_parts(table: PromptEmbeds) -> Iterator[dense_pb2.GatewayMessage]:
    for start in range(0, len(table.values), MAX_TABLE_PART_BYTES):
        part = dense_pb2.PromptEmbedsPart(hash=table.hash, values=table.values[start : start + MAX_TABLE_PART_BYTES])
        yield dense_pb2.GatewayMessage(prompt_embeds_part=part)
