"""With adapters the dense backend is torch; whoever asks for TensorRT is told why it cannot be."""

from __future__ import annotations

import pytest
import torch

from services.common.config import DenseSection, ModelSection
from services.common.errors import ConfigError
from services.common.resolve import ResolvedModel
from services.dense_worker.backends.select import prepare_backend
from services.dense_worker.tensorrt.profiles import Limits
from tests.support.model_configs import small_config

MODEL = ResolvedModel(small_config("qwen2"), torch.float32, torch.device("cpu"), 64)


def test_tensorrt_with_adapters_is_refused_by_name() -> None:
    section = DenseSection(backend="tensorrt", max_loras=2)
    with pytest.raises(ConfigError, match=r"max_loras is 2, but TensorRT has no adapters: set dense\.backend to torch"):
        prepare_backend(section, ModelSection(), MODEL, Limits(16, 4), print)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_other_backends_are_torch(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("nobody may look for TensorRT")

    monkeypatch.setattr("services.dense_worker.tensorrt.prepare.load_tensorrt", fail)
    section = DenseSection(backend=backend, max_loras=2)
    assert prepare_backend(section, ModelSection(), MODEL, Limits(16, 4), print).tensorrt is None
