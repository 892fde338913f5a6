"""Plans of a tower by the TensorRT at hand, against the same tower by torch in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("onnx", reason="onnx is not installed: `pip install -r requirements-export.txt`")

from services.common.vision.vision_config import load_vision_config
from services.dense_worker.encoders.vision.load import StoredTower
from services.dense_worker.encoders.vision.picture import Picture
from services.dense_worker.encoders.vision.tensorrt import tower_plans
from services.dense_worker.encoders.vision.tensorrt.tower_plans import find_or_build_tower
from services.dense_worker.encoders.vision.vision_encoder import VisionEncoder
from services.dense_worker.tensorrt.engine_plan_cache import EnginePlanCache
from services.dense_worker.tensorrt.gpu import current_gpu
from services.dense_worker.tensorrt.prepare import TensorRTPlans
from services.dense_worker.tensorrt.profiles import parse_profiles
from tests.gpu.gpu_cluster import DEVICE
from tests.gpu.usable_tensorrt import usable_tensorrt
from tests.support.dense.vision_models import make_vision_model, noise, run_tower

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

# Of the largest number. 8.6 sums products of float16 in float16; TF32 is off.
ROUNDING = {torch.float32: 1e-4, torch.float16: 2e-2}


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("variant", ["qwen2_5_vl", "llava_siglip"])
def test_plans_give_the_rows_of_the_tower(
    variant: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api, device = usable_tensorrt(), torch.device(DEVICE, 0)
    gpu = current_gpu(device)
    assert gpu is not None
    monkeypatch.setattr(tower_plans, "PROFILES", parse_profiles("1-64"))  # the larger picture runs in several calls
    path = make_vision_model(tmp_path / "model", variant)
    vision = load_vision_config(path)
    assert vision is not None
    found = TensorRTPlans(api, gpu, EnginePlanCache(tmp_path / "plans"), {})
    lines: list[str] = []
    plans = find_or_build_tower(found, vision, dtype, None, lines.append)
    print("\n".join(lines))
    pictures = []
    for name, image in (("a", noise(30, 43, 1)), ("b", noise(60, 20, 2))):
        shape = vision.layout.shape_of(image.height, image.width, is_low=False)
        tiles = np.stack([np.asarray(tile) for tile in vision.layout.tiles_of(image, shape)])
        pictures.append(Picture(name, shape, torch.from_numpy(tiles)))
    tower = StoredTower(vision, path, dtype, device, None).load().tower
    encoded = VisionEncoder(tower, vision.pixels, dtype, device, 4096, plans).begin(pictures).advance()
    assert encoded is not None
    exact = StoredTower(vision, path, torch.float32, torch.device("cpu"), None).load().tower
    for rows, expected in zip(encoded, run_tower(exact, pictures, vision.pixels), strict=True):
        error = (rows.on_stream().float().cpu() - expected).abs().max()
        assert error <= ROUNDING[dtype] * expected.abs().max(), f"{error}"
