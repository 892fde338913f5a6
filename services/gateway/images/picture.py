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
    """The prompt with all tokens of its pictures, and their spans. It has these already, or one token for each picture.

    ids: of tokens by name, for those that layouts name; token: the name of a picture's token. Raises `InvalidRequest`
    for another number of such tokens.
    """
    own = [[ids[name] for name in layout.tokens_of(each.shape, token)] for each in pictures]
    places, num_given = _places_of(token_ids, own, ids[token]), token_ids.count(ids[token])
    if places is None and num_given != len(pictures):
        whole = sum(each.count(ids[token]) for each in own)
        raise InvalidRequest(
            f"the prompt has {num_given} places for pictures ({token}), and the request has {len(pictures)} pictures"
            + (f" of {whole} tokens" if whole > len(pictures) else ""),
            "messages",
        )
    expanded: list[int] = []
    spans: list[PromptSpan] = []
    start = 0
    for index, (picture, tokens) in enumerate(zip(pictures, own, strict=True)):
        place = token_ids.index(ids[token], start) if places is None else places[index]
        expanded += token_ids[start:place]
        shape = picture.shape
        spans.append(PromptSpan(len(expanded), len(tokens), picture.hash, shape.grid_rows, shape.grid_columns))
        expanded += tokens
        start = place + (1 if places is None else len(tokens))
    return [*expanded, *token_ids[start:]], tuple(spans)


def _places_of(token_ids: list[int], own: Sequence[list[int]], token_id: int) -> list[int] | None:
    """Where the tokens of each picture begin in a prompt that has all of them; None if it has not."""
    if token_ids.count(token_id) != sum(each.count(token_id) for each in own):
        return None
    places, start = [], 0
    for tokens in own:
        place = token_ids.index(token_id, start) - tokens.index(token_id)
        if place < start or token_ids[place : place + len(tokens)] != tokens:
            return None
        places.append(place)
        start = place + len(tokens)
    return places


def encode_pictures(pictures: Sequence[Picture]) -> bytes:
    """The message for the dense worker's feature "images": the shapes of a prompt's pictures."""
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
