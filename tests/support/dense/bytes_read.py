"""`bytes_read`: loads the weights of a rank, and counts what it reads of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.common.model_config import load_model_config
from services.common.rank import Rank
from services.dense_worker.model.checkpoint import Checkpoint
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.weights import load_weights


def bytes_read(path: Path, rank: Rank) -> tuple[int, ModelWeights]:
    """In float32, on a CPU."""
    num_bytes, read = [], Checkpoint.tensor

    def counted(self: Checkpoint, *arguments: object) -> torch.Tensor:
        tensor = read(self, *arguments)
        num_bytes.append(tensor.nbytes)
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "tensor", counted)
        weights = load_weights(path, load_model_config(path), torch.float32, torch.device("cpu"), rank=rank)
    return sum(num_bytes), weights
