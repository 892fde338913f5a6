"""Ollama's POST /api/embed and /api/embeddings."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, Tag
from pydantic_core import to_json
from typing_extensions import TypedDict

from services.gateway.apis.ollama.conversion import name_without_tag
from services.gateway.apis.ollama.errors import ERROR_RESPONSES
from services.gateway.apis.shared.generation_fields import IGNORED
from services.gateway.apis.shared.inputs import Texts, input_list
from services.gateway.apis.shared.parts import by_shape
from services.gateway.apis.shared.pooled_answer import PooledAnswer, vector_json
from services.gateway.apis.shared.request_model import RequestModel
from services.gateway.apis.shared.routes import json_router
from services.gateway.http.json_pieces import list_pieces
from services.gateway.vectors.vectors import InputOptions, PooledInput, VectorInput, Vectors


class OllamaInputFields(RequestModel):
    """What both bodies have in common."""

    model: Annotated[str, Field(min_length=1)]
    options: dict[str, Any] | None = Field(None, description=IGNORED)
    keep_alive: Any = Field(None, description=IGNORED)


class OllamaEmbedRequest(OllamaInputFields):
    """Texts to make vectors of."""

    input: Annotated[Annotated[str, Tag("<text>")] | Annotated[Texts, Tag("<texts>")], by_shape()]
    truncate: bool | None = Field(None, description="false: refuse texts that are too long; default: cut their ends")
    dimensions: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Keep only so many first values; 0, the default: all"
    )

    @property
    def inputs(self) -> list[VectorInput]:
        """All texts, one element each."""
        return input_list(self.input) if self.input else []


class OllamaEmbeddingsRequest(OllamaInputFields):
    """A text to make a vector of."""

    prompt: str


class OllamaEmbeddings(TypedDict):
    """A vector of length 1 for each text. Times are nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(TypedDict):
    """The vector."""

    embedding: list[float]


def ollama_vector_routes(vectors: Vectors) -> APIRouter:
    """The routes of one gateway."""
    service = vectors.service
    # Ollama reads any body as JSON, and its clients send other content types or none.
    router = json_router(service, "Vectors", ERROR_RESPONSES, needs_json_type=False)

    def options(body: OllamaInputFields, request: Request, *, is_cut: bool) -> InputOptions:
        return InputOptions(
            model=name_without_tag(body.model, service.names_for(request.state.caller)),
            request_id=request.state.request_id,
            traceparent=request.headers.get("traceparent", ""),
            max_tokens=0 if is_cut else None,
        )

    @router.post("/api/embed", responses={200: {"model": OllamaEmbeddings}})
    async def create_ollama_embeddings(body: OllamaEmbedRequest, request: Request) -> Response:
        """The vector of each text, as Ollama gives it."""
        begun_at = time.monotonic()
        vectors.check_dimensions(body.dimensions or None)

        def write(pooled: Sequence[PooledInput]) -> Iterator[bytes]:
            yield b'{"model":%b,"embeddings":' % to_json(body.model)
            yield from list_pieces(vector_json(each, body.dimensions or None, True) for each in pooled)
            duration = max(1, round(1e9 * (time.monotonic() - begun_at)))
            num_tokens = sum(each.num_tokens for each in pooled)
            end = {"total_duration": duration, "load_duration": 1, "prompt_eval_count": num_tokens}
            yield b"," + to_json(end)[1:]

        return PooledAnswer(vectors, body.inputs, options(body, request, is_cut=body.truncate is not False), write)

    @router.post("/api/embeddings", responses={200: {"model": OllamaEmbedding}})
    async def create_ollama_embedding(body: OllamaEmbeddingsRequest, request: Request) -> Response:
        """The vector of a text, by Ollama's older route, which does not normalize it."""
        normalizes = vectors.embeds.normalizes

        def write(pooled: Sequence[PooledInput]) -> Iterator[bytes]:
            [each] = pooled
            yield b'{"embedding":'
            yield from vector_json(each, None, normalizes)
            yield b"}"

        given = [VectorInput("prompt", body.prompt)]
        return PooledAnswer(vectors, given, options(body, request, is_cut=True), write, "prompt")

    return router
