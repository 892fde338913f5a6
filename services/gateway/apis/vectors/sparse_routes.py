"""POST /embed_sparse, as in Text Embeddings Inference: what the tokens of a text count, by their ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from services.gateway.apis.vectors.pooled_answer import PooledAnswer, list_pieces
from services.gateway.apis.vectors.schema import Texts
from services.gateway.http.errors import ERROR_RESPONSES
from services.gateway.http.json_route import json_route, next_turn
from services.gateway.vectors.sparse import sparse_vector
from services.gateway.vectors.vectors import InputOptions, PooledInput, VectorInput, Vectors


class SparseRequest(RequestModel):
    """The inputs."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"prompt_name": ()}

    inputs: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[Texts, Tag("<texts>")],
        Discriminator(lambda value: "<texts>" if isinstance(value, list) else "<text>"),
    ] = Field(description="A text, or a list of texts")
    truncate: bool | None = Field(None, description="Cut longer texts to what the model takes; default: refuse them")
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = Field(
        None, description="With truncate: where texts are cut; default: right, at the end"
    )


class SparseValue(TypedDict):
    """What a token counts in an input."""

    index: int
    value: float


def sparse_routes(vectors: Vectors, section: GatewaySection) -> APIRouter:
    """The route of one gateway."""
    service = vectors.service
    route_class = json_route(section.max_body_values, service.heavy_work)
    router = APIRouter(route_class=route_class, tags=["Vectors"], responses=ERROR_RESPONSES)

    @router.post("/embed_sparse", response_class=Response, responses={200: {"model": list[list[SparseValue]]}})
    async def create_sparse_embeddings(body: SparseRequest, request: Request) -> Response:
        """A sparse vector of each input: the ids of its tokens, and what they count."""
        await next_turn(request)
        request_id: str = request.state.request_id
        body.log_unknown_fields(request_id)
        if TokenHead.SPARSE not in vectors.pooling.token_heads:
            raise InvalidRequest("this model makes no sparse vectors: it has no sparse_linear.safetensors", "model")
        texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        inputs = [VectorInput(f"inputs[{i}]" if len(texts) > 1 else "inputs", text) for i, text in enumerate(texts)]
        options = InputOptions(
            request_id=request_id,
            traceparent=request.headers.get("traceparent", ""),
            max_tokens=0 if body.truncate else None,
            keeps_last=(body.truncation_direction or "").lower() == "left",
            all_tokens=True,
            token_head=TokenHead.SPARSE,
        )
        special_ids = frozenset(service.tokenizer.hf_tokenizer.all_special_ids)

        def write(pooled: Sequence[PooledInput]) -> Iterator[bytes]:
            return list_pieces(_pieces(sparse_vector(each, special_ids)) for each in pooled)

        return PooledAnswer(vectors, inputs, options, write, "inputs")

    return router


def _pieces(vector: Mapping[int, float]) -> Iterator[bytes]:
    yield from list_pieces(iter([to_json({"index": token_id, "value": value})]) for token_id, value in vector.items())
