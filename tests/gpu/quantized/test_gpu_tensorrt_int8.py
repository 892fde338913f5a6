"""INT8 weights with TensorRT on the GPU at hand. Until this has passed, the worker refuses them with TensorRT 8.6."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("onnx", reason="onnx is not installed: `pip install -r requirements-export.txt`")

from services.dense_worker.tensorrt.api import TensorRT
from tests.gpu.gpu_cluster import DEVICE
from tests.gpu.usable_tensorrt import usable_tensorrt
from tests.support.quantized.built_plans import build_and_compare

# 8.6.0 took 68 s for one `middle` on an H200; there are three segments, each with one plan.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

# ‖found − reference‖ / ‖reference‖, as with onnxruntime: a value between two codes may become the other one.
OTHER_CODE = 1e-2


@pytest.fixture(scope="module")
def api() -> TensorRT:
    return usable_tensorrt()


@pytest.mark.parametrize("name", ["int8 channel, token", "int8 channel, static"])
def test_plans_compute_what_the_reference_computes(api: TensorRT, tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    with torch.cuda.stream(torch.cuda.Stream()), torch.inference_mode():
        built = build_and_compare(api, name, tmp_path, torch.device(DEVICE, 0))
        torch.cuda.synchronize()
    assert len(built.errors) == 3 * 5
    wrong = {output: error for output, error in built.errors.items() if not error < OTHER_CODE}
    assert not wrong, wrong
