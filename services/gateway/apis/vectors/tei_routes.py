"""POST /embed and /embed_sparse, as in Text Embeddings Inference: vectors, and what the tokens of a text count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Discriminator, Field, Tag
from pydantic_core import to_json
from typing_extensions import TypedDict

from services.common.config import GatewaySection
from services.common.errors import InvalidRequest
from services.common.pooling.pooling_config import TokenHead
from services.gateway.apis.shared.request_model import RequestModel
from services.gateway.apis.vectors.pooled_answer import PooledAnswer, list_pieces, number_pieces
from services.gateway.apis.vectors.schema import Texts
from services.gateway.http.errors import ERROR_RESPONSES
from services.gateway.http.json_route import json_route, next_turn
from services.gateway.vectors.sparse import sparse_vector
from services.gateway.vectors.vectors import InputOptions, PooledInput, VectorInput, Vectors, shaped


class TextsRequest(RequestModel):
    """Texts, as Text Embeddings Inference has them."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"prompt_name": ()}

    inputs: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[Texts, Tag("<texts>")],
        Discriminator(lambda value: "<texts>" if isinstance(value, list) else "<text>"),
    ] = Field(description="A text, or a list of texts")
    truncate: bool | None = Field(None, description="Cut longer texts to what the model takes; default: refuse them")
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = Field(
        None, description="With truncate: where texts are cut; default: right, at the end"
    )


    @property
    def vector_inputs(self) -> list[VectorInput]:
        """All inputs, one element each."""
        texts = [self.inputs] if isinstance(self.inputs, str) else self.inputs
        return [VectorInput(f"inputs[{i}]" if len(texts) > 1 else "inputs", text) for i, text in enumerate(texts)]

    def options(self, request: Request) -> InputOptions:
        """The same for all inputs."""
        return InputOptions(
            request_id=request.state.request_id,
            traceparent=request.headers.get("traceparent", ""),
            max_tokens=0 if self.truncate else None,
            keeps_last=(self.truncation_direction or "").lower() == "left",
        )


class EmbedRequest(TextsRequest):
    """Texts, and the form of their vectors."""

    normalize: bool | None = Field(None, description="Give vectors of length 1, which is the default")
    dimensions: Annotated[int, Field(ge=1)] | None = Field(None, description="Keep only so many first values")


class SparseValue(TypedDict):
    """What a token counts in an input."""

    index: int
    value: float


def tei_routes(vectors: Vectors, section: GatewaySection) -> APIRouter:
    """The routes of one gateway."""
    service = vectors.service
    route_class = json_route(section.max_body_values, service.heavy_work)
    router = APIRouter(route_class=route_class, tags=["Vectors"], responses=ERROR_RESPONSES)

    @router.post("/embed", response_class=Response, responses={200: {"model": list[list[float]]}})
    async def create_bare_embeddings(body: EmbedRequest, request: Request) -> Response:
        """The vector of each input, and nothing else."""
        await next_turn(request)
        body.log_unknown_fields(request.state.request_id)
        _ = vectors.embeds  # raises if this model makes none
        vectors.check_dimensions(body.dimensions)
        normalizes = body.normalize is not False

        def write(pooled: Sequence[PooledInput]) -> Iterator[bytes]:
            return list_pieces(
                number_pieces(shaped(each.values, body.dimensions, normalizes).tolist()) for each in pooled
            )

        return PooledAnswer(vectors, body.vector_inputs, body.options(request), write, "inputs")

    @router.post("/embed_sparse", response_class=Response, responses={200: {"model": list[list[SparseValue]]}})
    async def create_sparse_embeddings(body: TextsRequest, request: Request) -> Response:
        """A sparse vector of each input: the ids of its tokens, and what they count."""
        await next_turn(request)
        body.log_unknown_fields(request.state.request_id)
        if TokenHead.SPARSE not in vectors.pooling.token_heads:
            raise InvalidRequest("this model makes no sparse vectors: it has no sparse_linear.safetensors", "model")
        options = replace(body.options(request), all_tokens=True, token_head=TokenHead.SPARSE)
        special_ids = frozenset(service.tokenizer.hf_tokenizer.all_special_ids)

        def write(pooled: Sequence[PooledInput]) -> Iterator[bytes]:
            return list_pieces(_pieces(sparse_vector(each, special_ids)) for each in pooled)

        return PooledAnswer(vectors, body.vector_inputs, options, write, "inputs")

    return router


def _pieces(vector: Mapping[int, float]) -> Iterator[bytes]:
    yield from list_pieces(iter([to_json({"index": token_id, "value": value})]) for token_id, value in vector.items())
