"""The segments as ONNX graphs: torch.export records `model/segments.py`, and `onnx_lowering.py` converts the result.

No weights are needed: the shapes come from the config, and the recorded tensors lie on torch's meta device, which holds
no data. The weights are inputs of the graphs. TensorRT 8.6 and all later versions read opset 17; FP8 needs opset 19.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import onnx
import torch
import torch._meta_registrations  # which services leave out until here, see `services.common.process.importing`
from onnx import TensorProto, helper
from torch import nn

from services.channel import rows_of_layer
from services.common.errors import ConfigError
from services.common.families.shape import Activation
from services.common.model_config import ModelConfig
from services.dense_worker.model.head import Head
from services.dense_worker.model.layer import AfterAttention
from services.dense_worker.model.operations import Operations, Residual
from services.dense_worker.model.segments import behind_lookup, segment_names, segments_of
from services.dense_worker.model.torch_operations import TorchOperations
from services.dense_worker.model.weights import empty_weights
from services.dense_worker.parameters import tensors_by_name, with_tensors
from services.dense_worker.tensorrt.exported_products import ExportedOperations, check_exportable
from services.dense_worker.tensorrt.onnx_lowering import CODE_DTYPES, ONNX_DTYPES, Lowering

OPSET, FP8_OPSET = 17, 19
IR_VERSIONS = {OPSET: 8, FP8_OPSET: 9}  # those that came with the opsets
NUM_TOKENS, NUM_ROWS = "num_tokens", "num_rows"  # the graphs' dynamic dimensions


class Segment(Protocol):
    """A frozen dataclass of parameters, and what it computes."""

    @property
    def forward(self) -> Callable[..., Any]:
        """Takes operations, then the activations; returns one tensor or several."""


@dataclass(frozen=True, slots=True)
class Example:
    """A segment, and inputs on the meta device to trace it with."""

    segment: Segment
    activations: dict[str, tuple[str, torch.Tensor]]  # name -> name of dimension 0, tensor
    outputs: tuple[str, ...]
    output_rows: str  # name of their dimension 0


@dataclass(frozen=True, slots=True)
class _LastOfRows:
    """The last segment behind the selection of its rows: so a plan for a number of rows has no other size."""

    after: AfterAttention
    head: Head

    def forward(
        self, operations: Operations, attn_rows: torch.Tensor, residual_rows: torch.Tensor
    ) -> torch.Tensor:
        """attn_rows [r, attn_size], residual_rows [r, hidden] -> logits [r, vocab]"""
        attn_rows = rows_of_layer(attn_rows, self.after.attn_size)
        return self.head.forward(operations, self.after.forward(operations, attn_rows, Residual(residual_rows)))


def export_segment(name: str, config: ModelConfig, dtype: torch.dtype) -> onnx.ModelProto:
    """One of `segment_names(config)`, checked. Takes a second and no memory, whatever the model's size.

    Inputs: the activations, of `first` the rows of the embedding's table, of `last` those of the rows that need logits,
    then the weights in the order of the segment's parts. Outputs: `qkv` and `residual_out`, or `logits`. `first` has no
    `residual_out` where that would be its input.
    The same arguments give the same bytes. Raises ModelError for formats of quantized weights, and ConfigError for
    parts, that ONNX does not get.
    """
    if config.parts.num_learned_positions:
        raise ConfigError(f"the learned positions of {config.family!r} are not exported to ONNX")
    if config.encoder is not None:
        raise ConfigError(f"cross attention ({config.family!r}) runs only with dense.backend 'torch'")
    if config.recurrent_layers:
        raise ConfigError(f"the recurrent layers of {config.family!r} are not exported to ONNX and TensorRT")
    if config.attention.layer_heads or config.parts.layer_inputs is not None:
        raise ConfigError(f"layers with heads or inputs of their own ({config.family!r}) are not exported to ONNX")
    if config.parts.latent is not None:
        raise ConfigError(f"the latent attention of {config.family!r} is not exported to ONNX and TensorRT")
    if config.parts.experts is not None:
        raise ConfigError(f"the mixtures of experts of {config.family!r} are not exported to ONNX and TensorRT")
    if config.parts.activation is Activation.XIELU:
        raise ConfigError(f"the activation of {config.family!r} with learned numbers is not exported to ONNX")
    example = _EXAMPLES[name](config, dtype)
    check_exportable(example.segment)
    return export_example(f"{config.family}_{name}", example, ExportedOperations(), dtype)


def export_example(title: str, example: Example, operations: Any, dtype: torch.dtype) -> onnx.ModelProto:
    """The checked graph `title` of what the segment does with `operations` in torch."""
    weights = tensors_by_name(example.segment)
    sizes = {dim: torch.export.Dim(dim, min=1, max=1 << 20) for dim, _ in example.activations.values()}
    program = torch.export.export(
        TracedSegment(example.segment, operations),
        (*(tensor for _, tensor in example.activations.values()), *weights.values()),
        dynamic_shapes=((*({0: sizes[dim]} for dim, _ in example.activations.values()), *(None for _ in weights)),),
    )
    names = (*example.activations, *weights)
    has_fp8 = any(tensor.dtype == torch.float8_e4m3fn for tensor in weights.values())
    opset = FP8_OPSET if has_fp8 else OPSET
    lowering = Lowering(program.graph, dtype, names, example.outputs, opset)
    inputs = [_value(name, tensor, dim) for name, (dim, tensor) in example.activations.items()]
    inputs += map(_value, weights.keys(), weights.values())
    outputs = [_value(*output, example.output_rows) for output in zip(example.outputs, lowering.results, strict=True)]
    graph = helper.make_graph(lowering.nodes, title, inputs, outputs, lowering.constants)
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=IR_VERSIONS[opset],
        producer_name="twostroke",
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def export_networks(config: ModelConfig, dtype: torch.dtype) -> dict[str, bytes]:
    """All segments of a model, serialized, by name."""
    return {
        name: export_segment(name, config, dtype).SerializeToString(deterministic=True)
        for name in segment_names(config)
    }


class TracedSegment(nn.Module):
    """A segment whose weights are inputs, for torch.export, ONNX and TensorRT.

    Owns no parameters: forward takes the activations, then the weights in the order of `weight_names`.
    """

    def __init__(self, segment: Segment, operations: Any = None) -> None:
        """`segment` gives the parts. Its tensors are not used and may be on the meta device.

        `operations` are those that are recorded; None: torch's own of the text part.
        """
        super().__init__()
        self._segment = segment
        self._operations = operations or TorchOperations()
        self.weight_names = tuple(tensors_by_name(segment))

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
        """Runs `forward` of the segment with the given weights."""
        num_activations = len(inputs) - len(self.weight_names)
        weights = dict(zip(self.weight_names, inputs[num_activations:], strict=True))
        return with_tensors(self._segment, weights).forward(self._operations, *inputs[:num_activations])


def code_dtypes(network: bytes) -> set[torch.dtype]:
    """The types of those inputs of a serialized network that are codes of quantized weights."""
    found = {value.type.tensor_type.elem_type for value in onnx.load_from_string(network).graph.input}
    return {dtype for dtype, onnx_dtype in CODE_DTYPES.items() if onnx_dtype in found}


def describe_tensors(values: Iterable[onnx.ValueInfoProto]) -> list[dict[str, Any]]:
    """Name, dtype (torch's name) and shape (dynamic dimensions by name) of a graph's inputs or outputs."""
    known = (ONNX_DTYPES | CODE_DTYPES).items()
    dtypes = {onnx_dtype: str(dtype).removeprefix("torch.") for dtype, onnx_dtype in known}
    dtypes[TensorProto.INT32] = "int32"
    return [
        {
            "name": value.name,
            "dtype": dtypes[value.type.tensor_type.elem_type],
            "shape": [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim],
        }
        for value in values
    ]


def _value(name: str, tensor: torch.Tensor, dynamic: str | None = None) -> onnx.ValueInfoProto:
    is_index = tensor.dtype in (torch.int64, torch.int32)
    dtype = TensorProto.INT32 if is_index else (ONNX_DTYPES | CODE_DTYPES)[tensor.dtype]
    shape = list(tensor.shape) if dynamic is None else [dynamic, *tensor.shape[1:]]
    return helper.make_tensor_value_info(name, dtype, shape)


def _first(config: ModelConfig, dtype: torch.dtype) -> Example:
    segment = behind_lookup(segments_of(empty_weights(config, dtype, _META)).first)
    outputs = ("qkv",) if segment.embedding.is_lookup else ("qkv", "residual_out")
    rows = NUM_TOKENS, torch.empty(_TOKENS, config.embedding_size, dtype=dtype, device="meta")
    return Example(segment, {"embeddings": rows}, outputs, NUM_TOKENS)


def _middle(config: ModelConfig, dtype: torch.dtype) -> Example:
    segment = segments_of(empty_weights(config, dtype, _META)).middle[0]
    return Example(segment, _stream(config, dtype), ("qkv", "residual_out"), NUM_TOKENS)


def _last(config: ModelConfig, dtype: torch.dtype) -> Example:
    last = segments_of(empty_weights(config, dtype, _META)).last
    return Example(_LastOfRows(last.after, last.head), _stream(config, dtype, NUM_ROWS), ("logits",), NUM_ROWS)


def _stream(config: ModelConfig, dtype: torch.dtype, dim: str = NUM_TOKENS) -> dict[str, tuple[str, torch.Tensor]]:
    sizes = {"attn_out": config.attn_size, "residual": config.hidden_size}
    return {name: (dim, torch.empty(_TOKENS, size, dtype=dtype, device="meta")) for name, size in sizes.items()}


_META = torch.device("meta")
_TOKENS = 7  # any number except 0 and 1, which torch.export would treat as constants
_EXAMPLES = {"first": _first, "middle": _middle, "last": _last}
