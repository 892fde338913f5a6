"""TensorRT for tests on a GPU."""

from __future__ import annotations

import pytest
import torch

from services.common.errors import ConfigError
from services.dense_worker.tensorrt.api import TensorRT, load_tensorrt
from services.dense_worker.tensorrt.gpu import current_gpu
from tests.gpu.gpu_cluster import DEVICE


def usable_tensorrt() -> TensorRT:
    """The installed TensorRT; skips where none runs on this GPU in float16."""
    gpu = current_gpu(torch.device(DEVICE))
    try:
        api = load_tensorrt()
        assert gpu is not None
        api.check_gpu(gpu)
        api.check_dtype(torch.float16)
    except ConfigError as error:
        pytest.skip(str(error))
    return api
