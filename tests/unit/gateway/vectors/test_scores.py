"""Probabilities and scores equal torch's formulas."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.common.errors import InvalidRequest
from services.common.pooling.pooling_config import ClassifierHead, PoolingConfig, PoolingMethod
from services.gateway.vectors.scores import probabilities, score_pairs
from services.gateway.vectors.vectors import PooledInput, Vectors

VALUES = np.array([-90.0, 0.5, 88.0, 3.0], np.float32)
LABELS = ("a", "b", "c", "d")
CLASSIFIER = PoolingConfig(PoolingMethod.CLS, False, head=ClassifierHead.ENCODER, labels=LABELS)


def test_labels_compete_or_count_by_themselves_or_are_shown_as_they_are() -> None:
    values = torch.from_numpy(VALUES)
    for pooling, wanted in (
        (CLASSIFIER, values.softmax(0)),
        (replace(CLASSIFIER, is_multi_label=True), values.sigmoid()),
        (replace(CLASSIFIER, is_raw=True), values),
    ):
        np.testing.assert_allclose(probabilities(VALUES, pooling), wanted, atol=1e-6)
    np.testing.assert_allclose(probabilities(VALUES[1:2], CLASSIFIER), values[1:2].sigmoid(), atol=1e-6)


def test_a_score_may_be_the_value_before_the_sigmoid() -> None:
    scorer = replace(CLASSIFIER, labels=("a",))
    pooled = [PooledInput(VALUES[1:2], [5])]
    for shows_raw, wanted in ((False, torch.tensor(VALUES[1]).sigmoid().item()), (True, VALUES[1])):
        _, scores_of = score_pairs([("a", "b")], [("query", "documents[0]")], scorer, shows_raw=shows_raw)
        assert scores_of(pooled) == pytest.approx([wanted], abs=1e-6)


def test_a_classifier_with_several_labels_scores_nothing() -> None:
    with pytest.raises(InvalidRequest, match="4 labels"):
        score_pairs([("a", "b")], [("query", "documents[0]")], CLASSIFIER)


def test_a_classifier_that_is_asked_for_embeddings_names_the_routes_that_it_has() -> None:
    vectors = Vectors(None, CLASSIFIER, 8)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"no embeddings.*/classify, /score or /rerank"):
        vectors.embeds  # noqa: B018


def test_embeddings_of_equal_texts_are_computed_once() -> None:
    embeds = PoolingConfig(PoolingMethod.LAST, True)
    pairs = [("q", "x"), ("q", "y"), ("q", "x"), ("x", "q")]
    inputs, scores_of = score_pairs(pairs, [("text_1[0]", f"text_2[{i}]") for i in range(4)], embeds)
    assert [each.first for each in inputs] == ["q", "x", "y"]
    assert [each.name for each in inputs] == ["text_1[0]", "text_2[0]", "text_2[1]"]
    vectors = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    similar = torch.nn.functional.cosine_similarity
    wanted = [similar(vectors[0], vectors[i], dim=0).item() for i in (1, 2, 1, 1)]
    assert scores_of([PooledInput(each.numpy(), [5]) for each in vectors]) == pytest.approx(wanted, abs=1e-6)


def test_vectors_of_tokens_are_scored_by_the_best_match_of_each() -> None:
    """Also where a document has more tokens than are multiplied at once."""
    colbert = PoolingConfig(PoolingMethod.ALL, True)
    generator = torch.Generator().manual_seed(2)
    query, short, long = (torch.randn(count, 8, generator=generator) for count in (5, 3, 2500))
    pairs = [("q", "short"), ("q", "long"), ("short", "q")]
    inputs, scores_of = score_pairs(pairs, [("text_1", "text_2")] * 3, colbert)
    assert [each.first for each in inputs] == ["q", "short", "long"]

    def wanted(first: torch.Tensor, second: torch.Tensor) -> float:
        return torch.nn.functional.cosine_similarity(first[:, None], second[None], dim=2).max(1).values.sum().item()

    found = scores_of([PooledInput(each.numpy(), [5] * len(each)) for each in (query, short, long)])
    assert found == pytest.approx([wanted(query, short), wanted(query, long), wanted(short, query)], abs=1e-5)
    with pytest.raises(InvalidRequest, match="a classifier of tokens"):
        score_pairs(pairs, [("a", "b")] * 3, replace(CLASSIFIER, method=PoolingMethod.ALL))
