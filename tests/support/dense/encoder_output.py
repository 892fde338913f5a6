"""What an encoder computes when nothing runs between its parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.dense_worker.encoders.source.source_encoder import Body
from services.dense_worker.model.torch_operations import TorchOperations


def output_of(body: Body, inputs: Sequence[torch.Tensor], max_products: int = 2**40) -> torch.Tensor:
    """The rows of all inputs, one after the other."""
    parts = body.parts(TorchOperations(), inputs, max_products)
    while True:
        try:
            next(parts)
        except StopIteration as ended:
            return ended.value
