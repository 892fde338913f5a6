"""The exported segments run by onnxruntime on the CPU: what `export --test` and the tests compare with."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from services.common.errors import ConfigError
from services.common.model_config import ModelConfig
from services.dense_worker.model.segments import bind_weights
from services.dense_worker.model.weights import ModelWeights
from services.dense_worker.tensorrt.optional_packages import require


class OnnxRuntimeBackend:
    """A DenseBackend in float32 or float16, from serialized ONNX models by segment name; slow.

    Raises ConfigError where onnxruntime is missing, or for bfloat16, which it cannot compute on a CPU.
    """

    def __init__(self, networks: Mapping[str, bytes], weights: ModelWeights, config: ModelConfig) -> None:
        if weights.embed.dtype == torch.bfloat16:
            raise ConfigError("onnxruntime has no bfloat16 on a CPU: take float32 or float16")
        require("onnxruntime")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self._sessions = {
            name: onnxruntime.InferenceSession(network, options, providers=["CPUExecutionProvider"])
            for name, network in networks.items()
        }
        self._weights = {
            segment: [{name: tensor.numpy() for name, tensor in tensors.items()} for tensors in layers]
            for segment, layers in bind_weights(config, weights).items()
        }
        self._residual: np.ndarray | None = None  # [n, hidden], from `first` to `last`

    def first(self, token_ids: torch.Tensor, qkv_out: torch.Tensor) -> None:
        """See DenseBackend."""
        qkv, self._residual = self._run("first", 0, token_ids=token_ids.int().numpy())
        qkv_out.copy_(torch.from_numpy(qkv))

    def middle(self, layer: int, attn_out: torch.Tensor, qkv_out: torch.Tensor) -> None:
        """See DenseBackend."""
        qkv, self._residual = self._run("middle", layer, attn_out=attn_out.numpy(), residual=self._residual)
        qkv_out.copy_(torch.from_numpy(qkv))

    def last(self, attn_out: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See DenseBackend."""
        inputs = {"attn_out": attn_out.numpy(), "residual": self._residual, "rows": rows.int().numpy()}
        return torch.from_numpy(self._run("last", 0, **inputs)[0])

    def _run(self, segment: str, layer: int, **activations: np.ndarray | None) -> list[np.ndarray]:
        return self._sessions[segment].run(None, activations | self._weights[segment][layer])
