"""`TracedSegment`: a segment whose weights are inputs, for torch.export, ONNX and TensorRT."""

from __future__ import annotations

import torch
from torch import nn

from services.dense_worker.model.operations import Operations
from services.dense_worker.model.parameters import tensors_by_name, with_tensors
from services.dense_worker.model.segments import First, Last, Middle
from services.dense_worker.model.torch_operations import TorchOperations


class TracedSegment(nn.Module):
    """Owns no parameters: forward takes the activations, then the weights in the order of `weight_names`."""

    def __init__(self, segment: First | Middle | Last, operations: Operations | None = None) -> None:
        """`segment` gives the parts. Its tensors are not used and may be on the meta device.

        `operations` are those that are recorded; None: torch's own.
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
