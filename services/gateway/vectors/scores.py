"""What is made of vectors: probabilities of classes, and scores of pairs of texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from services.common.errors import InvalidRequest
from services.common.pooling.pooling_config import PoolingConfig
from services.gateway.vectors.vectors import PooledInput, VectorInput, normalized

Pair = tuple[str, str]
_ROWS_AT_A_TIME = 1024  # of a text's vectors, so that products take limited memory


def probabilities(values: np.ndarray, pooling: PoolingConfig) -> np.ndarray:
    """By softmax, or by a sigmoid for each label where there is one or each counts by itself: float32 [..., num_labels]
    """
    if pooling.is_raw:
        return values
    if pooling.is_multi_label or values.shape[-1] == 1:
        return sigmoid(values)
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def sigmoid(values: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), of any float32."""
    return 0.5 * (1.0 + np.tanh(0.5 * values))


def best_matches(first: np.ndarray, second: np.ndarray) -> float:
    """The sum of the largest product of each row of `first` with a row of `second` (ColBERT, arXiv:2004.12832).

    float32 [num_tokens, size] each
    """
    best = np.full(len(first), -np.inf, np.float32)
    for start in range(0, len(second), _ROWS_AT_A_TIME):
        np.maximum(best, (first @ second[start : start + _ROWS_AT_A_TIME].T).max(axis=1), out=best)
    return float(best.sum())


def score_pairs(
    pairs: Sequence[Pair],
    names: Sequence[Pair],
    pooling: PoolingConfig,
    max_second_tokens: int | None = None,
    *,
    shows_raw: bool = False,
) -> tuple[list[VectorInput], Callable[[Sequence[PooledInput]], list[float]]]:
    """The inputs whose vectors give the scores of pairs, and what makes the scores of these vectors.

    A classifier with one label reads both texts at once. With embeddings the score is the cosine between the two, and
    with a vector for each token the sum of the best cosine of each of the first text's: call that in a thread.
    names: of the texts in error messages. max_second_tokens: cut the second texts behind so many tokens of their own.
    shows_raw: a classifier's scores are its values, before any sigmoid.
    Raises `InvalidRequest` for a classifier with several labels.
    """
    if pooling.is_classifier:
        if not pooling.is_scorer:
            what = "of tokens" if pooling.has_each_token else f"with {len(pooling.labels)} labels, must be 1"
            raise InvalidRequest(f"this model cannot score pairs: it is a classifier {what}", "model")
        inputs = [VectorInput(name, *pair, max_second_tokens) for (_, name), pair in zip(names, pairs, strict=True)]

        def values(pooled: Sequence[PooledInput]) -> list[float]:
            return [float((each.values if shows_raw else probabilities(each.values, pooling))[0]) for each in pooled]

        return inputs, values
    texts = dict[tuple[str, int | None], VectorInput]()  # with where each is cut; each is computed once
    for pair, pair_names in zip(pairs, names, strict=True):
        for text, name, most in zip(pair, pair_names, (None, max_second_tokens), strict=True):
            texts.setdefault((text, most), VectorInput(name, text, max_own_tokens=most))
    places = {key: place for place, key in enumerate(texts)}

    def cosines(pooled: Sequence[PooledInput]) -> list[float]:
        units = [normalized(each.values) for each in pooled]
        score = best_matches if pooling.has_each_token else np.dot
        return [
            float(score(units[places[first, None]], units[places[second, max_second_tokens]]))
            for first, second in pairs
        ]

    return list(texts.values()), cosines
