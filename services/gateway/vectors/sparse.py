"""What the layers for tokens give (BGE-M3, arXiv:2402.03216): numbers and vectors of tokens, and sparse vectors."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from services.common.pooling.pooling_config import PoolingConfig, TokenHead
from services.gateway.vectors.vectors import PooledInput


def without_edges(pooled: PooledInput, pooling: PoolingConfig, head: TokenHead) -> np.ndarray:
    """The rows of an input's tokens, but for the special one in front and, for numbers, the one at the end.

    float32 [n, size]. Vectors for comparisons have one for the token at the end, as those of the model's own code.
    """
    assert pooling.edge_token_ids is not None, "a model with layers for tokens has these"
    first, last = pooling.edge_token_ids
    values, token_ids = pooled.values, pooled.token_ids
    start = int(token_ids[0] == first)
    end = len(values) - (head is TokenHead.SPARSE and token_ids[-1] == last)
    return values[start : max(start, end)]


def sparse_vector(pooled: PooledInput, special_ids: Collection[int]) -> dict[int, float]:
    """The largest number of each token of an input, by its id, but for those that are 0 and those of special tokens."""
    found: dict[int, float] = {}
    for token_id, value in zip(pooled.token_ids, pooled.values[:, 0].tolist(), strict=True):
        if value > found.get(token_id, 0.0) and token_id not in special_ids:
            found[token_id] = value
    return found
