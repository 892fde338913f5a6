"""POST /score, /rerank, /classify and /pooling, as vLLM has them, with the paths of Cohere and Jina."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Discriminator, Tag
from pydantic_core import to_json

from services.common.errors import InvalidRequest
from services.common.pooling.pooling_config import PoolingConfig, TokenHead
from services.gateway.apis.shared.pooled_answer import PooledAnswer, list_answer, usage_of
from services.gateway.apis.shared.routes import json_router
from services.gateway.apis.vectors.binary_answer import BinaryAnswer
from services.gateway.apis.vectors.label_scores import (
    GenerativeScoreFormat,
    LabelScoreFormat,
    LabelScoreRequest,
    LabelScores,
    label_scores,
)
from services.gateway.apis.vectors.routes import vector_pieces
from services.gateway.apis.vectors.schema import (
    ClassifyRequest,
    ClassList,
    PoolingList,
    PoolingRequest,
    RankList,
    RerankRequest,
    ScoredText,
    ScoreList,
    ScoreRequest,
)
from services.gateway.http.json_pieces import list_pieces
from services.gateway.vectors.scores import probabilities, score_pairs
from services.gateway.vectors.sparse import without_edges
from services.gateway.vectors.vectors import InputOptions, PooledInput, Vectors, shaped

MAX_INLINE_PAIRS = 64
_HEADS = {"token_embed": TokenHead.COLBERT, "token_classify": TokenHead.SPARSE}  # by vLLM's name of the task

AnyScoreRequest = Annotated[
    Annotated[ScoreRequest, Tag("<pairs>")] | Annotated[LabelScoreRequest, Tag("<labels>")],
    Discriminator(lambda body: "<labels>" if isinstance(body, Mapping) and body.get("label_token_ids") else "<pairs>"),
]


def score_routes(vectors: Vectors) -> APIRouter:
    """The routes for scores, ranks and classes of one gateway."""
    service = vectors.service
    router = json_router(service, "Vectors")

    def answer(
        options: InputOptions, objects: Iterable[Iterator[bytes]], pooled: Sequence[PooledInput]
    ) -> Iterator[bytes]:
        return list_answer(options.request_id, options.model or service.names.first, iter(objects), pooled)

    @router.post("/generative_scoring", responses={200: {"model": ScoreList}})
    async def create_generative_scores(body: LabelScoreRequest, request: Request) -> Response:
        """Of a model that generates: how likely the first label is behind the query and each item."""
        form = GenerativeScoreFormat(service, body, request.state.request_id)
        return await label_scores(body, request, service, form)

    @router.post("/v1/score", responses={200: {"model": ScoreList | LabelScores}})
    @router.post("/score", include_in_schema=False)
    async def create_scores(body: AnyScoreRequest, request: Request) -> Response:
        """How well the two texts of each pair belong together; or how likely labels are behind query and item."""
        if isinstance(body, LabelScoreRequest):
            return await label_scores(body, request, service, LabelScoreFormat(service, body))
        options = body.options(request)
        vectors.check_instruction(body.instruction)
        pairs = body.pairs()
        names = [(f"text_1[{i}]", f"text_2[{i}]") for i in range(len(pairs))]
        shows_raw = _shows_raw(body.use_activation, vectors)
        inputs, scores_of = score_pairs(pairs, names, vectors.pooling, shows_raw=shows_raw)

        scores = _Scores(scores_of)

        def write(pooled: Sequence[PooledInput]) -> Iterator[bytes]:
            objects = ({"index": i, "object": "score", "score": each} for i, each in enumerate(scores.of(pooled)))
            return answer(options, map(_whole, objects), pooled)

        prepare = scores.beforehand(len(pairs), vectors)
        return PooledAnswer(vectors, inputs, options, write, "text_2", len(pairs), prepare)

    @router.post("/v2/rerank", include_in_schema=False)
    @router.post("/v1/rerank", responses={200: {"model": RankList | list[ScoredText]}})
    @router.post("/rerank", include_in_schema=False)
    @router.post("/reranking", include_in_schema=False)  # llama.cpp's
    @router.post("/v1/reranking", include_in_schema=False)
    async def rerank(body: RerankRequest, request: Request) -> Response:
        """The documents in the order of how well they belong to the query."""
        options = body.options(request)
        vectors.check_instruction(body.instruction)
        texts = body.all_texts()
        names = [("query", f"{body.field}[{i}]") for i in range(len(texts))]
        pairs = [(body.query, text) for text in texts]
        inputs, scores_of = score_pairs(
            pairs, names, vectors.pooling, body.max_tokens_per_doc, shows_raw=_shows_raw(body.activation, vectors)
        )

        found_scores = _Scores(scores_of)

        def write(pooled: Sequence[PooledInput]) -> Iterator[bytes]:
            scores = found_scores.of(pooled)
            order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]
            if body.texts is not None:
                yield from list_pieces(_scored_text(i, scores[i], texts[i], body) for i in order)
                return
            ranked = (_ranked_document(i, scores[i], texts[i], body) for i in order)
            yield from _rank_list(options.request_id, body.model or service.names.first, ranked, pooled)

        prepare = found_scores.beforehand(len(texts), vectors)
        return PooledAnswer(vectors, inputs, options, write, body.field, len(texts), prepare)

    @router.post("/v1/classify", include_in_schema=False)
    @router.post("/classify", responses={200: {"model": ClassList}})
    async def classify(body: ClassifyRequest, request: Request) -> Response:
        """The probabilities of the labels of each input."""
        options = body.options(request)
        pooling = vectors.classes
        shows_raw = _shows_raw(body.use_activation, vectors)

        def write(pooled: Sequence[PooledInput]) -> Iterator[bytes]:
            def class_of(index: int, values: np.ndarray) -> dict[str, Any]:
                found = values if shows_raw else probabilities(values, pooling)
                label = pooling.labels[int(found.argmax())]
                return {"index": index, "label": label, "probs": found.tolist(), "num_classes": len(found)}

            objects = (class_of(index, each.values) for index, each in enumerate(pooled))
            return answer(options, map(_whole, objects), pooled)

        return PooledAnswer(vectors, body.inputs, options, write)

    @router.post("/pooling", responses={200: {"model": PoolingList}})
    async def pool(body: PoolingRequest, request: Request) -> Response:
        """The vector of each input, or of each of its tokens: embeddings, or the probabilities of labels."""
        options = body.options(request)
        pooling = vectors.pooling
        tasks = _tasks_of(pooling)
        if body.task is not None and body.task not in tasks:
            raise InvalidRequest(f"task is {body.task!r}, this model does {', '.join(tasks)}", "task")
        head = _HEADS.get(body.task) if not pooling.has_each_token else None
        head = head if head in pooling.token_heads else None
        is_of_tokens = body.task == "token_embed" or (body.task == "token_classify" and pooling.is_classifier)
        options = replace(options, all_tokens=is_of_tokens or head is not None, token_head=head)
        kept = body.without_inputs()
        vectors.check_dimensions(body.dimensions)
        if body.dimensions is not None and head is TokenHead.SPARSE:
            raise InvalidRequest("dimensions cannot be used with token_classify: a token has one number", "dimensions")
        if pooling.is_classifier:
            normalizes = pooling.normalizes if body.normalize is None else body.normalize
        else:
            normalizes = body.normalizes(pooling.normalizes) and head is not TokenHead.SPARSE
        is_plain = body.use_activation is False or not pooling.is_classifier

        def shape(values: np.ndarray) -> np.ndarray:
            return shaped(values if is_plain else probabilities(values, pooling), kept.dimensions, normalizes)

        def values_of(each: PooledInput) -> np.ndarray:
            if head is None:
                return each.values
            rows = without_edges(each, pooling, head)
            return rows[:, 0] if head is TokenHead.SPARSE else rows

        if body.is_binary:
            return BinaryAnswer(vectors, body, options, values_of, shape)

        def write(pooled: Sequence[PooledInput]) -> Iterator[bytes]:
            objects = (
                vector_pieces("pooling", "data", index, values_of(each), shape, kept.pack)
                for index, each in enumerate(pooled)
            )
            return answer(options, objects, pooled)

        return PooledAnswer(vectors, body.inputs, options, write)

    return router


def _shows_raw(use_activation: bool | None, vectors: Vectors) -> bool:
    """Whether a classifier's values are shown as they are. Raises `InvalidRequest` for embeddings."""
    if use_activation is not None and not vectors.pooling.is_classifier:
        raise InvalidRequest("use_activation is for classifiers, this model makes embeddings", "use_activation")
    return use_activation is False


class _Scores:
    """The scores of one request, which may be found before the answer is written."""

    def __init__(self, scores_of: Callable[[Sequence[PooledInput]], list[float]]) -> None:
        self._scores_of = scores_of
        self._found: list[float] | None = None

    def beforehand(self, num_pairs: int, vectors: Vectors) -> Callable[[Sequence[PooledInput]], None] | None:
        """What finds them in a thread. None: that takes about a millisecond."""
        return self.find if num_pairs > MAX_INLINE_PAIRS or vectors.pooling.has_each_token else None

    def find(self, pooled: Sequence[PooledInput]) -> None:
        """Computes them."""
        self._found = self._scores_of(pooled)

    def of(self, pooled: Sequence[PooledInput]) -> list[float]:
        """Those that have been found, or now."""
        return self._scores_of(pooled) if self._found is None else self._found


def _scored_text(index: int, score: float, text: str, body: RerankRequest) -> Iterator[bytes]:
    """As Text Embeddings Inference has it."""
    found: dict[str, Any] = {"index": index, "score": score}
    return _whole(found | {"text": text} if body.return_text else found)


def _ranked_document(index: int, score: float, text: str, body: RerankRequest) -> Iterator[bytes]:
    found: dict[str, Any] = {"index": index, "relevance_score": score}
    return _whole(found if body.return_documents is False else found | {"document": {"text": text}})


def _rank_list(
    request_id: str, model: str, ranked: Iterable[Iterator[bytes]], pooled: Sequence[PooledInput]
) -> Iterator[bytes]:
    """The JSON of a `RankList`."""
    head = {
        "id": request_id,
        "model": model,
        "usage": usage_of(pooled),
        "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
    }
    yield to_json(head)[:-1] + b',"results":'
    yield from list_pieces(ranked)
    yield b"}"


def _tasks_of(pooling: PoolingConfig) -> tuple[str, ...]:
    """What a model can be asked to do."""
    if pooling.has_each_token:
        return ("token_classify",) if pooling.is_classifier else ("token_embed",)
    if pooling.is_classifier:
        return "classify", "score", "token_classify"
    return ("embed", "token_embed", *(["token_classify"] if TokenHead.SPARSE in pooling.token_heads else []))


def _whole(value: dict[str, Any]) -> Iterator[bytes]:
    """The JSON of a small object."""
    yield to_json(value)
