"""POST /v2/embed and /v1/embed, as in Cohere's reference; vLLM has the former."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field
from pydantic_core import to_json
from typing_extensions import TypedDict

from services.common.errors import InvalidRequest
from services.common.shorten import quote
from services.gateway.apis.cohere.errors import ERROR_RESPONSES
from services.gateway.apis.shared.generation_fields import Priority
from services.gateway.apis.shared.inputs import Texts
from services.gateway.apis.shared.pooled_answer import PooledAnswer, number_pieces
from services.gateway.apis.shared.request_model import RequestModel, at_most
from services.gateway.apis.shared.routes import json_router
from services.gateway.http.json_pieces import list_pieces
from services.gateway.vectors.vectors import InputOptions, PooledInput, VectorInput, Vectors, shaped

Kind = Literal["float", "base64", "binary", "ubinary"]
# Cohere's kinds of inputs, each with the names of prompts that models have for it. Those without one have no prefix.
INPUT_TYPES: Mapping[str, tuple[str, ...]] = {
    "search_document": ("search_document", "document", "passage"),
    "search_query": ("search_query", "query"),
    "classification": ("classification", "Classification"),
    "clustering": ("clustering", "Clustering"),
}


class CohereEmbedRequest(RequestModel):
    """The texts, and the forms of their vectors."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"images": ([],), "inputs": ([],)}

    model: str | None = None
    texts: Texts
    input_type: str | None = Field(
        None,
        description="What the texts are for: a name of the model's prompts, one of which then stands before each, or "
        "search_document, search_query, classification or clustering",
    )
    embedding_types: Annotated[list[Kind] | None, at_most(4)] = Field(
        None, description="binary and ubinary: a bit for each value above 0, in bytes; default float"
    )
    truncate: Literal["NONE", "START", "END"] | None = Field(
        None, description="Where longer texts are cut; NONE: they are refused; default END"
    )
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(None, description="The longest text; default: the model's")
    output_dimension: Annotated[int, Field(ge=1)] | None = Field(None, description="Keep only so many first values")
    priority: Priority = None


class CohereEmbeddings(TypedDict, total=False):
    """A list for each form that was asked for, in the order of the texts."""

    float: list[list[float]]
    base64: list[str]
    binary: list[list[int]]
    ubinary: list[list[int]]


class CohereEmbedAnswer(TypedDict):
    """The vectors by their forms."""

    id: str
    response_type: Literal["embeddings_by_type"]
    texts: list[str]
    embeddings: CohereEmbeddings
    meta: dict[str, Any]


class CohereFloatsAnswer(TypedDict):
    """The vectors of /v1/embed, in the order of the texts, where no form was asked for."""

    id: str
    response_type: Literal["embeddings_floats"]
    texts: list[str]
    embeddings: list[list[float]]
    meta: dict[str, Any]


def cohere_vector_routes(vectors: Vectors) -> APIRouter:
    """The routes for embeddings of one gateway."""
    service = vectors.service
    router = json_router(service, "Vectors", ERROR_RESPONSES)

    @router.post("/v2/embed", responses={200: {"model": CohereEmbedAnswer}})
    async def embed(body: CohereEmbedRequest, request: Request) -> Response:
        """The vector of each text, in one or several forms."""
        return answer(body, request, body.embedding_types or ["float"], version="2")

    @router.post("/v1/embed", responses={200: {"model": CohereFloatsAnswer | CohereEmbedAnswer}})
    async def embed_v1(body: CohereEmbedRequest, request: Request) -> Response:
        """The same by Cohere's older API: a list of vectors, unless forms are named."""
        return answer(body, request, body.embedding_types or [], version="1")

    def answer(body: CohereEmbedRequest, request: Request, asked: Sequence[Kind], version: str) -> Response:
        request_id: str = request.state.request_id
        kinds = dict.fromkeys(asked)
        embeds = vectors.embeds
        vectors.check_dimensions(body.output_dimension, "output_dimension")
        prefix = _prefix_of(body.input_type, embeds.prompts)
        inputs = [VectorInput(f"texts[{i}]", prefix + text) for i, text in enumerate(body.texts)]
        options = InputOptions(
            model=body.model or "",
            request_id=request_id,
            traceparent=request.headers.get("traceparent", ""),
            priority=body.priority,
            max_tokens=min(body.max_tokens or 0, service.model.max_model_len),
            is_cut=body.truncate != "NONE",
            keeps_last=body.truncate == "START",
        )

        def write(pooled: Sequence[PooledInput]) -> Iterator[bytes]:
            def vectors_as(kind: Kind) -> Iterator[bytes]:
                shapes = (shaped(each.values, body.output_dimension, embeds.normalizes) for each in pooled)
                return list_pieces(_pieces(values, kind) for values in shapes)

            num_tokens = sum(each.num_tokens for each in pooled)
            meta = {
                "api_version": {"version": version},
                "billed_units": {"input_tokens": num_tokens},
                "tokens": {"input_tokens": num_tokens},
            }
            form = "embeddings_by_type" if kinds else "embeddings_floats"
            head = {"id": request_id, "response_type": form, "texts": body.texts, "meta": meta}
            yield to_json(head)[:-1] + b',"embeddings":'
            for index, kind in enumerate(kinds):
                yield (b"," if index else b"{") + to_json(kind) + b":"
                yield from vectors_as(kind)
            if not kinds:
                yield from vectors_as("float")
            yield b"}}" if kinds else b"}"

        return PooledAnswer(vectors, inputs, options, write, "texts")

    return router


def _prefix_of(input_type: str | None, prompts: Mapping[str, str]) -> str:
    """What stands before each text. Raises `InvalidRequest` for a kind that neither the model nor Cohere knows."""
    if input_type is None:
        return ""
    names = (input_type, *INPUT_TYPES.get(input_type, ()))
    if (found := next((name for name in names if name in prompts), None)) is not None:
        return prompts[found]
    if input_type not in INPUT_TYPES:
        known = ", ".join([*prompts, *INPUT_TYPES])
        raise InvalidRequest(f"Unsupported input_type {quote(input_type)}, supported: {known}", "input_type")
    return ""


def _pieces(values: np.ndarray, kind: Kind) -> Iterator[bytes]:
    """The JSON of a vector."""
    match kind:
        case "float":
            yield from number_pieces(values.tolist())
        case "base64":
            yield b'"' + base64.b64encode(values.astype("<f4").tobytes()) + b'"'
        case "binary" | "ubinary":
            bits = np.packbits(values > 0).astype(np.int16)
            yield to_json((bits - 128 if kind == "binary" else bits).tolist())
