"""What tests of drafts on the device run their steps with."""

from __future__ import annotations

from typing import Any

import pytest

from services.dense_worker.runner import cuda_model_runner
from tests.support.dense.drafting_runners import cpu_runner, cuda_runner
from tests.support.dense.without_cuda import EagerGraphs, TorchWithoutCuda


@pytest.fixture(params=[cpu_runner, cuda_runner], ids=["cpu", "cuda"])
def make_runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The runner for a GPU runs here without one, and without padding, which the channel does not have."""
    monkeypatch.setattr(cuda_model_runner, "torch", TorchWithoutCuda())
    monkeypatch.setattr(cuda_model_runner, "StepGraphs", EagerGraphs)
    monkeypatch.setattr(cuda_model_runner, "bucket_for", lambda buckets, size: max(1, size))
    return request.param
