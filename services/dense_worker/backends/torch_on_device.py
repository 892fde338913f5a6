"""`torch_backend`: the backend without TensorRT, by the device of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.common.model_config import ModelConfig
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.batch_invariant.torch_operations import BatchInvariantTorchOperations
from services.dense_worker.kernels.lora.tensors import LoraStore
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.torch_operations import TorchOperations

if TYPE_CHECKING:
    from services.dense_worker.backends.cuda_backend import CudaBackend


def torch_backend(
    weights: ModelWeights,
    config: ModelConfig,
    max_num_tokens: int,
    lora: LoraStore | None = None,
    *,
    is_deterministic: bool = False,
    rows_of_graphs: Sequence[int] = (),
) -> TorchBackend | CudaBackend:
    """The fastest backend without TensorRT on the device of `weights`; if `is_deterministic`, a batch-invariant one."""
    if weights.device.type == "cpu":
        return TorchBackend(weights, (BatchInvariantTorchOperations if is_deterministic else TorchOperations)(lora))
    from services.dense_worker.backends.cuda_backend import CudaBackend  # needs triton

    return CudaBackend(
        weights, config, max_num_tokens, lora, is_deterministic=is_deterministic, rows_of_graphs=rows_of_graphs
    )
