"""A dense worker whose random weights say a known text: after token t, t + 1 is most likely.

Benchmarks of speculation need texts that repeat themselves in known places, by models of true shapes. Weights of a
checkpoint are left as they are.
"""

from __future__ import annotations

from typing import Any

from services.dense_worker import build
from services.dense_worker.__main__ import main
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.parameters import tensors_by_name

# Embeddings are so much larger than what the layers add to them that the last hidden state keeps their direction.
EMBEDDING_SCALE = 2000.0

random_weights = build.random_weights


def known_text_weights(*arguments: Any) -> ModelWeights:
    """`random_weights` in which row t + 1 of `lm_head` has the direction of token t's embedding.

    Raises ValueError for a model whose `lm_head` is the embedding.
    """
    weights = random_weights(*arguments)
    table = weights.embedding.table.data
    lm_head = tensors_by_name(weights.head)["lm_head"]
    if lm_head is table:
        raise ValueError("the model's lm_head is its embedding, so its text cannot be chosen")
    lm_head.copy_(table.roll(1, 0))
    table.mul_(EMBEDDING_SCALE)
    return weights


def say_known_text() -> None:
    """Makes this process's dense worker fill random weights in this way."""
    build.random_weights = known_text_weights


if __name__ == "__main__":
    say_known_text()
    main()
