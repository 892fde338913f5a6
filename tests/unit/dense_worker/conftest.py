"""Each segment is exported to ONNX once for all tests of the dense worker, because an export takes a while."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import onnx
import pytest
import torch

from services.common.model_config import ModelConfig
from services.dense_worker.tensorrt import onnx_segments

real_export = onnx_segments.export_segment


@functools.cache
def exported(name: str, config: ModelConfig, dtype: torch.dtype) -> bytes:
    """The first export of this segment; `test_export.py` checks that another one gives the same."""
    return real_export(name, config, dtype).SerializeToString(deterministic=True)


@pytest.fixture(scope="session", autouse=True)
def kept_exports() -> Iterator[None]:
    """Lets `export_segment` return a copy of the first export for the same arguments."""

    def export_segment(name: str, config: ModelConfig, dtype: torch.dtype) -> onnx.ModelProto:
        return onnx.load_from_string(exported(name, config, dtype))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx_segments, "export_segment", export_segment)
        yield
