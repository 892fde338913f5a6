"""`Picture`: the pixels of a picture as the model's tower reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from services.common.errors import InvalidRequest
from services.common.memory_file import MemoryFile
from services.common.vision.layout import Layout, PictureShape
from services.pb import images_pb2
from services.step.prompt_span import PromptSpan

Pixels: TypeAlias = bytes | MemoryFile


@dataclass(frozen=True, slots=True)
class Picture:
    """Equal hashes mean equal pixels and sizes. Equal pixels of different files have different hashes."""

    hash: str  # hexadecimal
    shape: PictureShape
    pixels: Pixels  # [`PictureShape.pixels_shape`]

    @classmethod
    def of(cls, shape: PictureShape, pixels: Pixels, file_hash: bytes) -> Picture:
        """What a file became. file_hash: of its bytes, of which there are fewer than of pixels, and of `is_low`"""
        return cls(hashlib.sha256(f"{shape}\0".encode() + file_hash).hexdigest(), shape, pixels)


def expand(
    token_ids: list[int], pictures: Sequence[Picture], layout: Layout, ids: dict[str, int], token: str
) -> tuple[list[int], tuple[PromptSpan, ...]]:
    """The prompt with all tokens of its pictures, in place of one token for each, and their spans.

    ids: of tokens by name, for those that layouts name; token: the name of a picture's token. Raises `InvalidRequest`
    unless there is one such token for each picture.
    """
    num_places = token_ids.count(ids[token])
    if num_places != len(pictures):
        raise InvalidRequest(
            f"the prompt has {num_places} places for pictures ({token}), and the request has {len(pictures)} pictures",
            "messages",
        )
    expanded: list[int] = []
    spans: list[PromptSpan] = []
    start = 0
    for picture in pictures:
        place = token_ids.index(ids[token], start)
        expanded += token_ids[start:place]
        own = [ids[name] for name in layout.tokens_of(picture.shape, token)]
        shape = picture.shape
        spans.append(PromptSpan(len(expanded), len(own), picture.hash, shape.grid_rows, shape.grid_columns))
        expanded += own
        start = place + 1
    return [*expanded, *token_ids[start:]], tuple(spans)


def encode_pictures(pictures: Sequence[Picture]) -> bytes:
    """What the dense worker's feature "images" is told of a prompt's pictures."""
    shapes = [
        images_pb2.PictureShape(
            num_tiles=each.shape.num_tiles,
            height=each.shape.height,
            width=each.shape.width,
            original_height=each.shape.original_height,
            original_width=each.shape.original_width,
            resample=each.shape.resample,
        )
        for each in pictures
    ]
    return images_pb2.Pictures(shapes=shapes).SerializeToString()
