"""Makes what runs shards on a rank's device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from services.common.model_config import ModelConfig
from services.common.rank import Rank, seam_config
from services.common.resolve import ResolvedModel
from services.dense_worker.backends import DenseBackend
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.torch_operations import TorchOperations
from services.dense_worker.ranks.leading_backend import LeadingBackend, ShardOperations
from services.dense_worker.ranks.leading_stage import LeadingStage
from services.dense_worker.ranks.shard_runner import ShardRunner
from services.dense_worker.ranks.sharded_operations import ShardedOperations
from services.dense_worker.ranks.stage_links import StageLinks
from services.dense_worker.ranks.stage_weights import linked_weights


def leading_backend(
    weights: ModelWeights, model: ResolvedModel, max_num_tokens: int, lora: Any
) -> LeadingBackend:
    """The backend of the first rank. `lora`: the `LoraStore` of the rank's device; None: there are no adapters."""
    if not model.rank.is_stage:
        return LeadingBackend(*tensor_backend(weights, model, max_num_tokens, lora), lora)
    return LeadingStage(*stage_backend(weights, model, max_num_tokens, lora), model.config.vocab_size, lora)


def shard_runner(weights: ModelWeights, model: ResolvedModel, max_num_tokens: int, lora: Any) -> ShardRunner:
    """What runs the steps of another rank. `lora`: as for the first one."""
    make_backend = stage_backend if model.rank.is_stage else tensor_backend
    backend, operations = make_backend(weights, model, max_num_tokens, lora)
    num_layers = len(model.rank.layers(model.config.num_layers))
    if model.device.type == "cpu":
        return ShardRunner(backend, operations, num_layers, lora)
    from services.dense_worker.ranks.cuda_shard_runner import CudaShardRunner

    return CudaShardRunner(backend, operations, num_layers, max_num_tokens, model.device, lora)


def tensor_backend(
    weights: ModelWeights, model: ResolvedModel, max_num_tokens: int, lora: Any
) -> tuple[DenseBackend, ShardOperations]:
    """The backend of a rank's shard, and its operations."""
    config = model.config
    if model.device.type == "cpu":
        operations = ShardedOperations(config.vocab_size, lora)
        return TorchBackend(weights, operations=operations), operations
    from services.dense_worker.backends.cuda_backend import CudaBackend  # needs triton
    from services.dense_worker.ranks.sharded_cuda_operations import ShardedCudaOperations

    sizes = shard_sizes(config, model.rank)
    on_gpu = ShardedCudaOperations(sizes, config.vocab_size, max_num_tokens, model.dtype, model.device, lora)
    return CudaBackend(weights, sizes, max_num_tokens, lora, operations=on_gpu), on_gpu


def stage_backend(
    weights: ModelWeights, model: ResolvedModel, max_num_tokens: int, lora: Any
) -> tuple[DenseBackend, StageLinks]:
    """The backend of a pipeline's stage, and its links."""
    links = StageLinks(torch.float32 if model.device.type == "cpu" else model.dtype)
    weights = linked_weights(weights, links)
    if model.device.type == "cpu":
        return TorchBackend(weights, TorchOperations(lora)), links
    from services.dense_worker.backends.cuda_backend import CudaBackend  # needs triton
    from services.dense_worker.backends.cuda_operations import CudaOperations

    sizes = seam_config(model.config, model.rank)
    on_gpu = CudaOperations(sizes, max_num_tokens, model.dtype, model.device, lora)
    return CudaBackend(weights, sizes, max_num_tokens, lora, operations=on_gpu), links


def shard_sizes(config: ModelConfig, rank: Rank) -> ModelConfig:
    """The model with the heads and the experts of one rank."""
    seam, experts = seam_config(config, rank), config.parts.experts
    if experts is None:
        return seam
    size = len(rank.share(experts.intermediate_size))
    return replace(seam, parts=replace(seam.parts, experts=replace(experts, intermediate_size=size)))
