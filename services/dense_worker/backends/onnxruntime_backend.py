"""Runs the exported segments with onnxruntime on the CPU, for `export --test` and the tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional as F

from services.common.errors import ConfigError
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.segments import bind_weights
from services.dense_worker.tensorrt.api import require
from services.step import StepPlan


class OnnxRuntimeBackend:
    """A DenseBackend in float32 or float16, from serialized ONNX models by segment name; slow.

    Raises ConfigError if onnxruntime is missing, or for bfloat16, which it cannot compute on a CPU.
    """

    takes_input_embeds = captures_embeds = False
    gives_hidden_states = False
    always_ends = skips_logits = False
    logits_dtype = torch.float32

    def __init__(self, networks: Mapping[str, bytes], weights: ModelWeights) -> None:
        if weights.dtype == torch.bfloat16:
            raise ConfigError("onnxruntime has no bfloat16 on a CPU: take float32 or float16")
        require("onnxruntime")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        # It would take products of FP8 codes for such of integers, and then not find its kernels.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        self._sessions = {
            name: onnxruntime.InferenceSession(network, options, providers=["CPUExecutionProvider"])
            for name, network in networks.items()
        }
        self._table = weights.embedding.table.data
        self._weights = {
            segment: [{name: _as_value(tensor) for name, tensor in tensors.items()} for tensors in layers]
            for segment, layers in bind_weights(weights).items()
        }  # OrtValues share the tensors' memory

    def begin_step(
        self, plan: StepPlan, num_tokens: int, num_sampled: int = 0, input_embeds: None = None
    ) -> None:
        """Does nothing."""

    def first(self, token_ids: torch.Tensor, qkv_out: torch.Tensor, input_embeds: None = None) -> torch.Tensor:
        """Runs the first segment, copies its qkv -> the residual."""
        rows = F.embedding(token_ids, self._table)
        qkv, *residual = self._run("first", 0, embeddings=rows)
        qkv_out.copy_(qkv)
        return residual[0] if residual else rows

    def middle(
        self, layer: int, attn_out: torch.Tensor, residual: torch.Tensor, qkv_out: torch.Tensor
    ) -> torch.Tensor:
        """Runs a middle segment, copies its qkv -> the next residual."""
        qkv, residual = self._run("middle", layer, attn_out=attn_out, residual=residual)
        qkv_out.copy_(qkv)
        return residual

    def last(
        self, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor, hidden_out: None = None
    ) -> torch.Tensor:
        """Runs the last segment -> the logits."""
        return self._run("last", 0, attn_out=attn_out[rows], residual=residual[rows])[0]

    def hidden(
        self, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor, hidden_out: torch.Tensor
    ) -> None:
        """Never called."""
        raise AssertionError("onnxruntime keeps the hidden states to itself")

    def _run(self, segment: str, layer: int, **activations: torch.Tensor) -> list[torch.Tensor]:
        inputs = {name: _as_value(tensor) for name, tensor in activations.items()} | self._weights[segment][layer]
        outputs = self._sessions[segment].run_with_ort_values(None, inputs)
        return [torch.from_numpy(output.numpy()) for output in outputs]


def _as_value(tensor: torch.Tensor) -> Any:
    """The tensor as onnxruntime's `OrtValue`. numpy has no FP8: there its bytes are given with their type."""
    from onnx import TensorProto
    from onnxruntime import OrtValue

    if tensor.dtype == torch.float8_e4m3fn:
        octets = tensor.view(torch.uint8).numpy()
        return OrtValue.ortvalue_from_numpy_with_onnx_type(octets, TensorProto.FLOAT8E4M3FN)
    return OrtValue.ortvalue_from_numpy(tensor.numpy())
