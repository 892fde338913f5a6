"""llama.cpp's POST /embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import AliasChoices, Field
from typing_extensions import TypedDict

from services.gateway.apis.llama_cpp.errors import ERROR_RESPONSES
from services.gateway.apis.shared.inputs import Input, InputFields, input_list
from services.gateway.apis.shared.pooled_answer import PooledAnswer, vector_json
from services.gateway.apis.shared.routes import json_router
from services.gateway.http.json_pieces import list_pieces
from services.gateway.vectors.vectors import PooledInput, Vectors

EUCLID = 2  # llama.cpp's number of the norm


class PlainEmbeddingRequest(InputFields):
    """The inputs as llama.cpp has them."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"encoding_format": ("float",)}

    input: Input = Field(
        validation_alias=AliasChoices("input", "content"),
        description="A text, token ids, texts between token ids, or a list of such inputs; content is the same",
    )
    embd_normalize: Literal[-1, 2] | None = Field(
        None, description="2: vectors of length 1; -1: as they are; default: as the model says"
    )


class PlainEmbedding(TypedDict):
    """The vector of one input, as the only one of a list."""

    index: int
    embedding: list[list[float]]


def llama_cpp_vector_routes(vectors: Vectors) -> APIRouter:
    """The route of one gateway."""
    router = json_router(vectors.service, "Vectors", ERROR_RESPONSES)

    @router.post("/embedding", include_in_schema=False)
    @router.post("/embeddings", responses={200: {"model": list[PlainEmbedding]}})
    async def create_plain_embeddings(body: PlainEmbeddingRequest, request: Request) -> Response:
        """The vector of each input, in a list alone."""
        embeds = vectors.embeds
        normalizes = embeds.normalizes if body.embd_normalize is None else body.embd_normalize == EUCLID

        def write(pooled: Sequence[PooledInput]) -> Iterator[bytes]:
            return list_pieces(_plain_pieces(index, each, normalizes) for index, each in enumerate(pooled))

        return PooledAnswer(vectors, input_list(body.input), body.options(request), write)

    return router


def _plain_pieces(index: int, pooled: PooledInput, normalizes: bool) -> Iterator[bytes]:
    yield b'{"index":%d,"embedding":[' % index
    yield from vector_json(pooled, None, normalizes)
    yield b"]}"
