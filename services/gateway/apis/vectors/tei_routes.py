"""Text Embeddings Inference's routes: /embed, /embed_all, /embed_sparse, /similarity, /predict and /decode.

POST / and /info are where those of other dialects are: `services/gateway/apis/invocations.py`, `same_paths.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Discriminator, Field, Tag
from pydantic_core import to_json
from typing_extensions import TypedDict

from services.common.config import MAX_INPUTS
from services.common.errors import InvalidRequest
from services.common.pooling.pooling_config import TokenHead
from services.gateway import __version__
from services.gateway.apis.shared.answer import PiecewiseAnswer
from services.gateway.apis.shared.inputs import Input, Texts, input_list, prompt_text
from services.gateway.apis.shared.pooled_answer import PooledAnswer, number_pieces, vector_json
from services.gateway.apis.shared.request_model import RequestModel, TokenLists, at_most
from services.gateway.apis.shared.routes import json_router
from services.gateway.http.json_pieces import list_pieces, text_pieces
from services.gateway.resources.heavy_work import MAX_INLINE_BYTES
from services.gateway.vectors.scores import probabilities, score_pairs
from services.gateway.vectors.sparse import sparse_vector
from services.gateway.vectors.vectors import InputOptions, PooledInput, VectorInput, Vectors


class TruncationFields(RequestModel):
    """How texts that are too long are read."""

    truncate: bool | None = Field(None, description="Cut longer texts to what the model takes; default: refuse them")
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = Field(
        None, description="With truncate: where texts are cut; default: right, at the end"
    )

    def options(self, request: Request) -> InputOptions:
        """What all inputs have in common."""
        return InputOptions(
            request_id=request.state.request_id,
            traceparent=request.headers.get("traceparent", ""),
            max_tokens=0 if self.truncate else None,
            keeps_last=(self.truncation_direction or "").lower() == "left",
        )


class PromptFields(TruncationFields):
    """What stands before texts."""

    prompt_name: str | None = Field(None, description="Name of one of the model's prompts, which precedes each text")

    def prefix(self, prompts: Mapping[str, str]) -> str:
        """The text of the prompt. Raises `InvalidRequest` if the model has none of that name."""
        return "" if self.prompt_name is None else prompt_text(self.prompt_name, prompts)


class TextsRequest(PromptFields):
    """Texts or their token ids, as Text Embeddings Inference has them."""

    inputs: Input = Field(description="A text, token ids, or a list of either")

    def vector_inputs(self, prompts: Mapping[str, str]) -> list[VectorInput]:
        """All inputs, one element each. Raises `InvalidRequest` for token ids with a prompt."""
        prefix, inputs = self.prefix(prompts), input_list(self.inputs, "inputs")
        if not prefix:
            return inputs
        if not all(isinstance(each.first, str) for each in inputs):
            raise InvalidRequest("prompt_name cannot be used with token ids", "prompt_name")
        return [replace(each, first=f"{prefix}{each.first}") for each in inputs]


class EmbedRequest(TextsRequest):
    """Texts, and the form of their vectors."""

    normalize: bool | None = Field(None, description="Give vectors of length 1, which is the default")
    dimensions: Annotated[int, Field(ge=1)] | None = Field(None, description="Keep only so many first values")


class SimilarityInput(RequestModel):
    """A text, and those that it is compared with."""

    source_sentence: str
    sentences: Texts


class SimilarityRequest(RequestModel):
    """Sentences to compare."""

    inputs: SimilarityInput
    parameters: PromptFields | None = None


OneOrTwo = Annotated[list[str], Field(min_length=1, max_length=2)]


def _kind_of_predicted(value: Any) -> str:
    if not isinstance(value, list):
        return "<text>"
    return "<list>" if value and isinstance(value[0], list) else "<texts>"


class PredictRequest(TruncationFields):
    """Texts to classify, alone or in pairs."""

    inputs: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[OneOrTwo, Tag("<texts>")]
        | Annotated[list[OneOrTwo], Field(fail_fast=True), at_most(MAX_INPUTS), Tag("<list>")],
        Discriminator(_kind_of_predicted),
    ] = Field(description="A text, a pair of texts, or a list of lists of one text or two")
    raw_scores: bool | None = Field(None, description="Give the values of the labels, not probabilities")

    @property
    def is_list(self) -> bool:
        """Whether the answer is a list for each of several inputs."""
        return _kind_of_predicted(self.inputs) == "<list>"

    @property
    def vector_inputs(self) -> list[VectorInput]:
        """All inputs, one element each."""
        if isinstance(self.inputs, str):
            return [VectorInput("inputs", self.inputs)]
        if not self.is_list:
            return [VectorInput("inputs", *self.inputs)]  # type: ignore[arg-type]
        return [VectorInput(f"inputs[{i}]", *each) for i, each in enumerate(self.inputs)]  # type: ignore[arg-type]


class DecodeRequest(RequestModel):
    """Token ids of one text or of several."""

    ids: TokenLists = Field(description="Token ids, or a list of lists of them")
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the texts; default true")


class SparseValue(TypedDict):
    """What a token counts in an input."""

    index: int
    value: float


class Prediction(TypedDict):
    """A label of an input."""

    score: float
    label: str


class ModelInfo(TypedDict):
    """The served model and the limits of requests."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    model_type: dict[str, dict[str, Any]]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str


def tei_routes(vectors: Vectors) -> APIRouter:
    """The routes of one gateway."""
    service = vectors.service
    router = json_router(service, "Vectors")

    @router.post("/embed", responses={200: {"model": list[list[float]]}})
    async def create_bare_embeddings(body: EmbedRequest, request: Request) -> Response:
        """The vector of each input, and nothing else."""
        inputs = body.vector_inputs(vectors.embeds.prompts)
        vectors.check_dimensions(body.dimensions)
        normalizes = body.normalize is not False

        def write(pooled: Sequence[PooledInput]) -> Iterator[bytes]:
            return list_pieces(vector_json(each, body.dimensions, normalizes) for each in pooled)

        return PooledAnswer(vectors, inputs, body.options(request), write, "inputs")

    @router.post("/embed_all", responses={200: {"model": list[list[list[float]]]}})
    async def create_token_embeddings(body: TextsRequest, request: Request) -> Response:
        """The vector of each token of each input, special ones included, as they are."""
        vectors.check_makes_embeddings()
        inputs = body.vector_inputs(vectors.pooling.prompts)

        def write(pooled: Sequence[PooledInput]) -> Iterator[bytes]:
            return list_pieces(list_pieces(number_pieces(row.tolist()) for row in each.values) for each in pooled)

        return PooledAnswer(vectors, inputs, replace(body.options(request), all_tokens=True), write, "inputs")

    @router.post("/embed_sparse", responses={200: {"model": list[list[SparseValue]]}})
    async def create_sparse_embeddings(body: TextsRequest, request: Request) -> Response:
        """A sparse vector of each input: the ids of its tokens, and what they count."""
        pooling = vectors.pooling
        if TokenHead.SPARSE not in pooling.token_heads:
            raise InvalidRequest("this model makes no sparse vectors: it has no sparse_linear.safetensors", "model")
        options = replace(body.options(request), all_tokens=True, token_head=TokenHead.SPARSE)
        special_ids = frozenset(service.tokenizer.hf_tokenizer.all_special_ids)

        def write(pooled: Sequence[PooledInput]) -> Iterator[bytes]:
            return list_pieces(_pieces(sparse_vector(each, special_ids)) for each in pooled)

        return PooledAnswer(vectors, body.vector_inputs(pooling.prompts), options, write, "inputs")

    @router.post("/similarity", responses={200: {"model": list[float]}})
    async def compare(body: SimilarityRequest, request: Request) -> Response:
        """The cosine between the vector of a text and that of each other."""
        pooling, given = vectors.embeds, body.inputs
        parameters = body.parameters or PromptFields()  # type: ignore[call-arg]
        prefix = parameters.prefix(pooling.prompts)
        vectors.check_num_given(len(given.sentences), "inputs.sentences")
        source = prefix + given.source_sentence  # once: it may be long, and there may be thousands of pairs
        pairs = [(source, prefix + each) for each in given.sentences]
        names = [("inputs.source_sentence", f"inputs.sentences[{i}]") for i in range(len(pairs))]
        inputs, scores_of = score_pairs(pairs, names, pooling)
        scores: list[float] = []

        def find(pooled: Sequence[PooledInput]) -> None:
            scores.extend(scores_of(pooled))

        def write(pooled: Sequence[PooledInput]) -> Iterator[bytes]:
            return number_pieces(scores)

        options = parameters.options(request)
        return PooledAnswer(vectors, inputs, options, write, "inputs.sentences", len(pairs), find)

    @router.post("/predict", responses={200: {"model": list[Prediction] | list[list[Prediction]]}})
    async def predict(body: PredictRequest, request: Request) -> Response:
        """The labels of each input with their probabilities, the likeliest first."""
        pooling = vectors.classes

        def labels_of(values: np.ndarray) -> bytes:
            scores = (values if body.raw_scores else probabilities(values, pooling)).tolist()
            order = sorted(range(len(scores)), key=lambda i: -scores[i])
            return to_json([{"score": scores[i], "label": pooling.labels[i]} for i in order])

        def write(pooled: Sequence[PooledInput]) -> Iterator[bytes]:
            if not body.is_list:
                return iter([labels_of(pooled[0].values)])
            return list_pieces(iter([labels_of(each.values)]) for each in pooled)

        return PooledAnswer(vectors, body.vector_inputs, body.options(request), write, "inputs")

    @router.post("/decode", responses={200: {"model": list[str]}})
    async def decode(body: DecodeRequest, request: Request) -> Response:
        """The text of each list of token ids."""
        lists = body.ids if body.ids and isinstance(body.ids[0], list) else [body.ids]
        vectors.check_num_given(len(lists), "ids")
        skips = body.skip_special_tokens is not False
        caller, held = request.state.caller, request.state.held
        texts = await service.detokenize(lists, skips, caller, held, "ids")  # type: ignore[arg-type]
        if sum(map(len, texts)) > MAX_INLINE_BYTES:
            return PiecewiseAnswer(list_pieces(map(text_pieces, texts)), service.heavy_work)
        return JSONResponse(texts)

    return router


def model_info(vectors: Vectors) -> ModelInfo:
    """The model, what it is for, and the limits of requests."""
    service, pooling = vectors.service, vectors.pooling
    kind: dict[str, dict[str, Any]] = {"embedding": {"pooling": pooling.method.value}}
    if pooling.is_classifier:
        labels = {str(i): label for i, label in enumerate(pooling.labels)}
        classes = {"id2label": labels, "label2id": {label: i for i, label in enumerate(pooling.labels)}}
        kind = {"reranker" if pooling.is_scorer else "classifier": classes}
    return {
        "model_id": service.names.root,
        "model_sha": None,
        "model_dtype": service.model.dtype,
        "model_type": kind,
        "max_concurrent_requests": service.section.max_connections,
        "max_input_length": service.max_input_tokens,
        "max_batch_tokens": service.max_input_tokens * vectors.max_inputs,  # a request is no batch here
        "max_client_batch_size": vectors.max_inputs,
        "auto_truncate": False,
        "tokenization_workers": 1,
        "version": __version__,
    }


def _pieces(vector: Mapping[int, float]) -> Iterator[bytes]:
    yield from list_pieces(iter([to_json({"index": token_id, "value": value})]) for token_id, value in vector.items())
