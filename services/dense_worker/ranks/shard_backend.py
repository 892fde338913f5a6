"""Makes the backends that run shards."""

from __future__ import annotations

from services.common.resolve import ResolvedModel
from services.dense_worker.backends import DenseBackend
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.ranks.leading_backend import LeadingBackend, ShardOperations
from services.dense_worker.ranks.sharded_operations import ShardedOperations


def shard_backend(weights: ModelWeights, model: ResolvedModel) -> tuple[DenseBackend, ShardOperations]:
    """The backend of a rank's shard, and its operations."""
    operations = ShardedOperations(model.config.vocab_size)
    return TorchBackend(weights, operations=operations), operations


def leading_backend(weights: ModelWeights, model: ResolvedModel) -> LeadingBackend:
    """The backend of the first rank."""
    return LeadingBackend(*shard_backend(weights, model))
