"""Fixtures of the tests of dense kernels."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.dense.operands import TOLERANCES

pytest.importorskip("triton", reason="needs triton")

from services.dense_worker.kernels.triton_launch import KernelLauncher


@pytest.fixture(params=TOLERANCES, ids=str)
def dtype(request: pytest.FixtureRequest, kernel_device: torch.device) -> torch.dtype:
    if kernel_device.type == "cpu" and request.param == torch.bfloat16:
        pytest.skip("Triton's interpreter does not round bfloat16")
    return request.param


@pytest.fixture
def launcher(kernel_device: torch.device) -> KernelLauncher:
    return KernelLauncher(kernel_device)
